"""Writing a recording: a `Writer` that is appended to while the model runs, and `save` for one that is complete."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.errors import FormatError, OptionError, QuotaError
from hookline.store import folders, remote_writer
from hookline.store.appender import Appender, Staged
from hookline.store.event_like import EventLike
from hookline.store.format import END, HEAD, MANIFEST, ModuleInfo, dump_end, dump_head, writer_name
from hookline.store.planned import Refused
from hookline.store.reader import StoredEvent
from hookline.store.remote import Place, Remote
from hookline.store.remote_writer import RemoteAppender

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AT_ONCE = 20_000
"""Events that `save` writes at once, since their manifest lines wait in memory for their shards."""


class Writer:
    """Writes one recording, or one process's part of it. A context manager.

    What an `append` that returned has written survives a crash, and a crash leaves of the others nothing that is read.
    `stage` and `commit` do it in two steps, for what is to be seen as a whole and is too much to wait in memory.

    Several processes may write into one recording, each with its own ``writer``: the first to come makes the folder,
    the others join it. No two ever write into the same file, not even those that come with the same number at once.

    Args:
        folder: The recording, ``run.hookline``. Missing parents are made. Or a URL, ``s3://bucket/run.hookline``.
        info: What is known about the recording; strict JSON.
        modules: The modules of the model by path.
        writer: Number of this writer, such as the rank of the process.
        overwrite: Replace a recording of that name: the whole of it for writer 0, that writer's part for others.
        again: Join a recording that has a part of that writer already, which stays as it is.
        quota: Most bytes on disk for what this writer writes; with ``again``, all that it has written counts.

    Raises:
        OptionError: The recording exists, with a part of that writer, or of other sites or another model.
        FormatError: Something else stands there, or the place cannot be written to.
        ArgumentError: ``info`` is not JSON.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Remote,
        *,
        info: Mapping[str, Any],
        modules: Mapping[str, ModuleInfo],
        writer: int = 0,
        overwrite: bool = False,
        again: bool = False,
        quota: int | None = None,
    ) -> None:
        if writer < 0:
            raise OptionError(f"writer has to be a number from 0 on, got {writer}. Pass the rank of the process.")
        head, own = dump_head(info, modules), writer_name(writer)
        self.folder = folders.place_of(folder)
        self._made = False
        self.part = self.folder / own
        with _writing(self.folder):
            used = _used(self.folder, writer) if again and quota is not None else 0
            if isinstance(self.folder, Remote):
                if overwrite:
                    remote_writer.refuse(self.folder, overwrite)
                self._made = remote_writer.claim(self.folder, head, own, writer, again=again)
            elif overwrite:
                _replace(self.folder, head, own, writer)
            else:
                self._made = _claim(self.folder, head, own, writer, again=again)
            self._appender = _appender(self.part, quota, used)
        self._closed = False

    def append(self, events: Iterable[EventLike], refused: Refused | None = None) -> list[StoredEvent]:
        """Write some events and wait until the disk has them. After an error, it is as if it had not been called.

        They are one commit: a reader finds all of them or none, also after a crash. Only where they need more than
        64 MiB of JSON, some 200,000 tensors, are they several commits, of which a crash may leave the first ones.

        Args:
            events: The events.
            refused: Gets each event that cannot be stored, and why; the others are written.

        Returns:
            The events as they stand on disk, in the same order, without those that were refused.

        Raises:
            ArgumentError: An event holds something that cannot be stored, and ``refused`` is None.
            FormatError: The disk is full or refuses. What was appended before can be read.
            QuotaError: The quota would be passed.
            OptionError: The writer is closed.
        """
        with self._writing("Append"):
            return self._appender.append(events, refused)

    def stage(self, staged: Staged, events: Iterable[EventLike], refused: Refused | None = None) -> list[StoredEvent]:
        """Write the shards of more events, which no reader sees before they are committed.

        Args:
            staged: Gets them added; begin with ``Staged()``. After an error it is as before.
            events: The events.
            refused: As for `append`.

        Returns:
            The events as they stand on disk, in the same order; they can be read at once.

        Raises:
            ArgumentError, FormatError, QuotaError, OptionError: As for `append`.
        """
        with self._writing("Append"):
            return self._appender.stage(staged, events, refused)

    def commit(self, several: Sequence[Staged]) -> None:
        """Make what was staged part of the recording, as one commit, and wait until the disk has it.

        Raises:
            FormatError, OptionError: As for `append`. It is still staged then.
        """
        with self._writing("Append"):
            self._appender.commit(several)

    def discard(self, staged: Staged) -> None:
        """Delete what was staged and not committed."""
        self._appender.discard(staged)

    def end(self, said: Mapping[str, Any]) -> None:
        """Write down what is known of this part only at its end, in ``end.json`` in its folder.

        Raises:
            ArgumentError: It is not JSON.
            FormatError: The disk is full or refuses.
        """
        text = dump_end(said)
        with self._writing("End it"):
            if isinstance(self.part, Remote):
                (self.part / END).put(text)
            else:
                folders.write_whole(self.part / END, text)

    def describe(self, *, info: Mapping[str, Any], modules: Mapping[str, ModuleInfo]) -> None:
        """Say anew what the recording is, when more modules turn up while it is written.

        Raises:
            ArgumentError: ``info`` is not JSON.
            FormatError: The disk is full or refuses. The description is then as it was.
            OptionError: The writer is closed.
        """
        head = dump_head(info, modules)
        with self._writing("Describe"):
            if isinstance(self.folder, Remote):
                (self.folder / HEAD).put(head)
            else:
                folders.write_head(self.folder, head)

    def take_back(self) -> None:
        """Close, and delete this part if nothing was committed to it, with a recording that was made for it alone."""
        self.close()
        if not self._appender.is_empty:
            return
        if isinstance(self.part, Remote):
            remote_writer.take_back(self.part.parent, self.part.name, made=self._made)
            return
        folders.remove(self.part)
        if self._made:
            with contextlib.suppress(OSError):
                folders.remove_empty(self.part.parent)

    def close(self) -> None:
        """Close the files. Nothing is left to be written."""
        self._closed = True
        self._appender.close()

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        if self._closed:
            raise OptionError(f"{self.folder}: this writer is closed. {what} before the with-block ends.")
        with _writing(self.folder):
            yield

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def save(
    folder: str | os.PathLike[str],
    *,
    info: Mapping[str, Any],
    modules: Mapping[str, ModuleInfo],
    events: Iterable[EventLike],
    overwrite: bool = False,
) -> None:
    """Write a whole recording, or nothing; the events of each writer into a folder of its own.

    It is written next to its place and renamed when complete. A recording that is overwritten stays until then.

    Args:
        folder: The recording, ``run.hookline``. Missing parents are made.
        info: What is known about the recording; strict JSON.
        modules: The modules of the model by path.
        events: All events.
        overwrite: Replace a recording of that name.

    Raises:
        OptionError: A recording of that name exists.
        FormatError: Something else stands there, or the place cannot be written to.
        ArgumentError: ``info`` is not JSON, or an event holds something that cannot be stored.
    """
    head, place = dump_head(info, modules), folders.place_of(folder)
    parts: dict[int, list[EventLike]] = {}
    for event in events:
        parts.setdefault(event.writer, []).append(event)
    names = {number: writer_name(number) for number in sorted(parts) or [0]}
    if isinstance(place, Remote):
        return _save_remote(place, head, names, parts, overwrite)
    with _writing(place):
        _refuse(place, overwrite)
        first, *others = names.values()
        draft = folders.make_draft(place, head, first)
        try:
            for name in others:
                folders.add_writer(draft, name)
            for number, name in names.items():
                _append_all(Appender(draft / name), parts.get(number, []))
            _put(draft, place, overwrite)
        except BaseException:
            folders.remove(draft)
            raise


def _append_all(appender: Appender, events: Iterable[EventLike]) -> None:
    with contextlib.closing(appender):
        rest = iter(events)
        while some := list(itertools.islice(rest, _AT_ONCE)):
            appender.append(some)


def _save_remote(
    place: Remote, head: bytes, names: Mapping[int, str], parts: Mapping[int, list[EventLike]], overwrite: bool
) -> None:
    """Write all of a recording; what makes it one comes last."""
    remote_writer.refuse(place, overwrite)
    try:
        for number, own in names.items():
            (place / own / MANIFEST).put(b"")
            _append_all(RemoteAppender(place / own), parts.get(number, []))
    except BaseException:
        for own in names.values():
            remote_writer.remove(place, own)
        raise
    try:
        (place / HEAD).put(head, new=True)
    except FileExistsError:
        if not remote_writer.arrived(place, head, names.values()):  # another process was faster
            for own in names.values():
                remote_writer.remove(place, own)
            remote_writer.refuse(place, overwrite=False)
    except FormatError as error:  # it may arrive all the same, so the parts stay
        raise FormatError(
            f"{error} Nobody knows whether {HEAD} is there: with it the recording is complete; without it, delete what "
            f"lies under {place} and save again."
        ) from error


def _appender(part: Place, quota: int | None, used: int = 0) -> Appender:
    return (RemoteAppender if isinstance(part, Remote) else Appender)(part, quota=quota, used=used)


def _used(folder: Place, writer: int) -> int:
    """Bytes of all that a writer has in a recording, if there is one."""
    if isinstance(folder, Remote):
        return sum(sum(part.children().values()) for part in remote_writer.parts_of(folder, writer))
    return sum(map(folders.size_of, folders.parts_of(folder, writer))) if folder.is_dir() else 0


def check_free(folder: str | os.PathLike[str] | Remote, *, overwrite: bool = False, writer: int | None = None) -> None:
    """Raise what a ``Writer`` of that number, or else ``save``, would raise because of what stands there.

    Nothing is written. Without ``overwrite``, a writer joins a recording that has no part of its number yet.

    Raises:
        OptionError: A recording of that name exists, and ``overwrite`` is False.
        FormatError: Something else stands there.
    """
    place = folders.place_of(folder)
    if isinstance(place, Remote):
        if overwrite or writer is None or (remote_writer.is_taken(place) and remote_writer.parts_of(place, writer)):
            remote_writer.refuse(place, overwrite)
        return
    with _writing(place):
        if overwrite or writer is None or (folders.is_taken(place) and folders.parts_of(place, writer)):
            _refuse(place, overwrite)


def _refuse(folder: Path, overwrite: bool) -> None:
    if not overwrite:
        folders.refuse_taken(folder)
    elif folders.is_taken(folder):
        folders.check_replaceable(folder)


def _put(draft: Path, folder: Path, overwrite: bool) -> None:
    """Give a complete draft its place; looks again, since somebody else may have come first."""
    _refuse(folder, overwrite)
    if os.path.lexists(folder):
        folders.replace(draft, folder)
    else:
        folders.publish(draft, folder)


def _claim(folder: Path, head: bytes, own: str, writer: int, *, again: bool = False) -> bool:
    """Make a new recording, or join one that has no part of this writer yet; any with ``again``. True for a new one."""
    if not folders.is_taken(folder):
        draft = folders.make_draft(folder, head, own)
        try:
            folders.publish(draft, folder)
            return True
        except BaseException as error:
            folders.remove(draft)
            if not isinstance(error, OSError) or not folders.is_taken(folder):
                raise  # otherwise another process was faster: join it
    if not again and folders.parts_of(folder, writer):
        folders.refuse_taken(folder)
    folders.check_same(folder, head)
    folders.add_writer(folder, own)
    return False


def _replace(folder: Path, head: bytes, own: str, writer: int) -> None:
    if not folders.is_taken(folder):
        _claim(folder, head, own, writer)
        return
    folders.check_replaceable(folder)
    if writer != 0:
        for part in folders.parts_of(folder, writer):
            old = folders.hidden(folder, "old")
            os.rename(part, old)
            folders.remove(old)
        return folders.add_writer(folder, own)
    draft = folders.make_draft(folder, head, own)
    try:
        folders.replace(draft, folder)
    except BaseException:
        folders.remove(draft)
        raise


@contextlib.contextmanager
def _writing(folder: Place) -> Iterator[None]:
    """An OSError as one clear FormatError that names the folder."""
    try:
        yield
    except QuotaError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            advice = "Free some space or choose another disk. What was appended before is complete and can be read."
        else:
            advice = "Choose a folder that you may write to."
        raise FormatError(f"{folder}: the recording cannot be written ({reason}). {advice}") from error
