"""Writing on an object store: shards are put as a whole, and after them the manifest that names them, as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from hookline.errors import FormatError, OptionError
from hookline.store import format as layout
from hookline.store.appender import Appender, Staged
from hookline.store.folders import check_same, read_head
from hookline.store.format import HEAD, MANIFEST, ShardLine, manifest_name, parse_head, writer_prefix
from hookline.store.remote import Remote
from hookline.store.remote_shard import put_shard
from hookline.store.shard import Shard
from hookline.store.strict_json import fault
from hookline.store.tensors import Stored

LONGEST = 256 << 10
"""Bytes of a manifest after which a commit begins another one, since each commit puts all of the last one again."""
_OTHER_NAME = "Choose another name"


class _Last(NamedTuple):
    """The last manifest as it was put: its number, its text and the number of its lines."""

    number: int
    text: bytes
    lines: int


class RemoteAppender(Appender):
    """Appends to a writer's folder on an object store. Errors of the store are FormatErrors.

    Args:
        folder: The writer's folder, with an empty manifest.
        quota: Most bytes that shards and manifests may take; None for no limit.
        used: Bytes of it that are taken already.
    """

    def _open(self) -> None:
        self._last = _Last(0, b"", 0)
        self._in_doubt: set[str] = set()  # shards of commits that failed: a manifest may name them all the same

    @property
    def is_empty(self) -> bool:
        """Whether nothing was committed, nor may have been."""
        return not (self._last.text or self._last.number or self._in_doubt)

    def close(self) -> None:
        """Nothing is open."""

    def _write_shard(self, name: str, tensors: list[tuple[str, Stored]]) -> tuple[ShardLine, Shard]:
        return put_shard(self._folder / name, tensors)

    def _settle(self) -> None:
        pass

    def _take_back(self) -> None:
        pass  # _write_lines has done it

    def _write_lines(self, lines: list[bytes], several: tuple[Staged, ...]) -> tuple[Remote, int]:
        before = self._last
        new = len(before.text) >= LONGEST
        number, text, count = _Last(before.number + 1, b"", 0) if new else before
        manifest: Remote = self._folder / manifest_name(number)
        if not lines:
            return manifest, count + 1
        longer = _Last(number, b"".join([text, *lines]), count + len(lines))
        try:
            manifest.put(longer.text)
            self._last, self._complete = longer, self._complete._replace(last=several)
        except BaseException:
            # it may have arrived although no answer came; so its shards stay, and the manifest is put as it was
            self._last = before
            self._in_doubt |= {name for staged in several for name in staged._names}
            with contextlib.suppress(FormatError):
                manifest.delete() if new else manifest.put(text)
            raise
        return manifest, count + 1

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._in_doubt:
                with contextlib.suppress(FormatError):  # what stays is not read, since no line names it
                    (self._folder / name).delete()


def is_taken(place: Remote) -> bool:
    """Whether a recording stands there already.

    Raises:
        FormatError: Something else stands there, or the store cannot be asked.
    """
    there = place.children()  # recording.json is put before everything else, but by a save() that was killed
    if HEAD in there:
        parse_head(read_head(place), place / HEAD)
        return True
    advice = f"{_OTHER_NAME}, or delete them if a killed save() left them; they were left as they are."
    if there or place.size() is not None:
        raise fault(place, f"there are objects, and they are not a Hookline recording (there is no {HEAD})", advice)
    return False


def refuse(place: Remote, overwrite: bool) -> None:
    """Complain when something stands at the place of a new recording.

    Raises:
        OptionError: A recording does, or it is to be overwritten.
        FormatError: Something else does.
    """
    if overwrite:
        raise OptionError(
            f"{place}: overwrite=True works on a disk only, since an object store cannot exchange one recording for "
            f"another at once. Delete the old one first, or choose another name."
        )
    if is_taken(place):
        raise OptionError(f"{place}: a recording of that name exists. {_OTHER_NAME}, or delete it first.")


def parts_of(place: Remote, writer: int) -> list[Remote]:
    """What a recording holds of the writer with that number."""
    prefix = writer_prefix(writer)
    names = (name for name in place.children() if name.startswith(prefix))
    return [place / name for name in sorted(names) if layout.WRITER_NAME.fullmatch(name)]


def claim(place: Remote, head: bytes, own: str, writer: int, *, again: bool) -> bool:
    """Make a new recording, or join one that has no part of this writer yet; any with ``again``. Whether it is new."""
    made = False
    if not is_taken(place):
        with contextlib.suppress(FileExistsError):  # another process was faster: join it
            (place / HEAD).put(head, new=True)
            made = True
    if not made:
        if not again and parts_of(place, writer):
            refuse(place, overwrite=False)
        check_same(place, head)
    try:
        (place / own / MANIFEST).put(b"")
    except BaseException:
        take_back(place, own, made=made)
        raise
    if not made and (place / HEAD).size() is None:  # who made it has taken it back meanwhile
        with contextlib.suppress(FileExistsError):
            (place / HEAD).put(head, new=True)
    return made


def take_back(place: Remote, own: str, *, made: bool) -> None:
    """Delete what a writer has put, as far as that is possible, with a recording that was made for it alone.

    Somebody who joins it meanwhile puts a part and then looks for ``recording.json``; here it is the other way round,
    so that one of both puts it back.
    """
    remove(place, own)
    if made:
        with contextlib.suppress(FormatError, FileNotFoundError, FileExistsError):
            if [*place.children()] == [HEAD]:
                head = read_head(place)
                (place / HEAD).delete()
                if place.children():
                    (place / HEAD).put(head, new=True)


def arrived(place: Remote, head: bytes, names: Iterable[str]) -> bool:
    """Whether the ``recording.json`` that is there belongs to these writers' folders and to nothing else.

    A client that asks again when an answer is lost finds its own object in its way.
    """
    return set(place.children()) == {HEAD, *names} and read_head(place) == head


def remove(place: Remote, own: str) -> None:
    """Delete what a writer has put, as far as that is possible; its manifest first, so that nobody reads the rest."""
    with contextlib.suppress(FormatError):
        names = sorted((place / own).children(), key=lambda name: not name.startswith("manifest"))
        for name in names:
            (place / own / name).delete()
