"""What is left of a damaged recording as a new one; the damaged one stays as it is."""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hookline.errors import ArgumentError, FormatError, OptionError
from hookline.store import folders, reader, strict_json
from hookline.store import format as layout
from hookline.store.format import (
    BATCH,
    END,
    HEAD,
    MANIFEST,
    Commit,
    ModuleInfo,
    dump_end,
    dump_head,
    parse_end,
    parse_head,
)
from hookline.store.loss import UNREAD, counted, guess, held, sites_of, where
from hookline.store.names import site_name
from hookline.store.remote import Place, refuse_remote
from hookline.store.shard import open_regular
from hookline.store.strict_json import fault
from hookline.store.verify import Search


class Repair(NamedTuple):
    """What was saved, and what was not.

    Attributes:
        commits: Commits in the new recording.
        events: Their events; what the rows of others are is none.
        lost: One line for each thing that was part of the recording and is not part of the new one.
        left_out: One line for each leftover that never was part of it: unfinished lines, drafts, shards without a line.
    """

    commits: int
    events: int
    lost: list[str]
    left_out: list[str]


def repair(folder: str | os.PathLike[str], new: str | os.PathLike[str]) -> Repair:
    """Make a new recording of the commits of another that are whole.

    Shards are hard-linked where the file system can, so that they take no room; a shard never changes.

    Args:
        folder: The damaged recording; nothing in it is changed.
        new: The recording to make.

    Raises:
        FormatError: There is no recording, it is of another version of the format, or the new one cannot be written.
        OptionError: Something stands at the new place, or that lies in the damaged one.
    """
    for given in (folder, new):
        refuse_remote(given, "repair")
    old, place = _place_of(folder), folders.on_disk(new)
    if os.path.lexists(place):
        raise OptionError(f"{place}: something of that name exists and was left as it is. Choose another name.")
    if old.resolve() in place.resolve().parents:
        raise OptionError(f"{place} lies in the recording that is repaired. Choose a name outside of {old}.")
    draft = folders.hidden(place, "new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        found = _Salvage(old, draft)
        found.run()
        folders.publish(draft, place)
    except OSError as error:
        folders.remove(draft)
        advice = "Choose a folder that you may write to, with enough room."
        raise fault(place, f"the new recording cannot be written ({error})", advice) from error
    except BaseException:
        folders.remove(draft)
        raise
    return Repair(found.commits, sum(found.sites.values()), found.lost, found.left_out)


def _place_of(folder: str | os.PathLike[str]) -> Path:
    """The recording, also when it has lost its ``recording.json``."""
    path = Path(os.path.abspath(folder))
    headless = path.is_dir() and not os.path.lexists(path / HEAD)
    if headless and any(layout.WRITER_NAME.fullmatch(entry.name) for entry in path.iterdir()):
        return path
    reader.place_of_recording(folder)
    return path


class _Salvage:
    """Copies what is whole into a draft.

    Attributes:
        commits: Commits that were copied.
        sites: Events that were copied, by path and port; without what their rows are.
        asked: Sites that were asked for, as the ends of the writers say.
        lost: As of `Repair`.
        left_out: As of `Repair`.
    """

    def __init__(self, old: Path, draft: Path) -> None:
        self.commits = 0
        self.sites: Counter[tuple[str, str]] = Counter()
        self.lost: list[str] = []
        self.left_out: list[str] = []
        self.asked: dict[tuple[str, str], None] = {}
        self._old, self._draft = old, draft

    def run(self) -> None:
        """Copy all of it; what it says of itself comes last, since it may have to be made from the events."""
        head = self._head()
        for path in sorted(self._old.iterdir()):
            if layout.WRITER_NAME.fullmatch(path.name):
                self._writer(path)
        folders.write_synced(self._draft / HEAD, head or self._new_head())
        folders.sync_folder(self._draft)

    # ------------------------------------------------------------ recording.json

    def _head(self) -> bytes | None:
        """The text of ``recording.json``, sealed; None when it is damaged."""
        place = self._old / HEAD
        try:
            text = folders.read_head(self._old)
            _refuse_other_version(text, place)
            info, modules = parse_head(text, place)
        except _OtherVersion as error:
            raise FormatError(str(error)) from None
        except (FormatError, OSError) as error:
            self.lost.append(
                f"{HEAD}: {_reason(error, place)}. A new one was made from the events: it names the sites, but not the "
                "model, its classes and numbers of parameters, and what else was known; so resume=True refuses it"
            )
            return None
        return text if strict_json.is_sealed(text) else dump_head(info, modules)

    def _new_head(self) -> bytes:
        found = dict.fromkeys([*self.asked, *self.sites])
        paths = dict.fromkeys(path for path, _ in found)
        sites = [site_name(path, port) for path, port in found]
        info = {"sites": sites, "repaired": f"{HEAD} was damaged and has been made anew from the events"}
        return dump_head(info, {path: ModuleInfo("", 0) for path in paths})

    # ------------------------------------------------------------ a writer

    def _writer(self, old: Path) -> None:
        if old.is_symlink() or not old.is_dir():
            self.lost.append(f"{old.name}: it is not a plain folder, so it was not followed")
            return
        files = sorted(entry.name for entry in old.iterdir())
        shards = [name for name in files if layout.SHARD_NAME.fullmatch(name)]
        self.left_out += [f"{old.name}/{name}: an unfinished shard" for name in files if _is_draft(name)]
        self.left_out += [f"{old.name}/{name}: an unfinished {END}" for name in files if name == f".{END}.tmp"]
        manifests = self._manifests(old, files)
        if not manifests:
            if shards or END in files:
                self.lost.append(f"{old.name}: it has no {MANIFEST}, so {len(shards)} shards cannot be read")
            return
        named: set[str] = set()
        kept = self._lines(old, manifests, named)
        self.left_out += [f"{old.name}/{name}: no line names this shard" for name in shards if name not in named]
        new = self._draft / old.name
        new.mkdir()
        for whole in kept:
            for shard in whole.commit.shards:
                _link(old / shard.file, new / shard.file)
        folders.write_synced(new / MANIFEST, b"".join(whole.text for whole in self._in_order(kept)))
        if END in files and (text := self._end(old / END)) is not None:
            folders.write_synced(new / END, text)
        folders.sync_folder(new)

    def _end(self, place: Path) -> bytes | None:
        """The text of an ``end.json``, sealed; None when it is damaged."""
        try:
            text = folders.read_small(place)
            said = parse_end(text, place)
            sealed = text if strict_json.is_sealed(text) else dump_end(said)
        except (FormatError, ArgumentError, OSError) as error:
            self.lost.append(
                f"{place.parent.name}/{END}: {_reason(error, place)}; what became of each site, and how long the model "
                "waited for this writer, cannot be read"
            )
            return None
        self.asked |= dict.fromkeys(sites_of(said))
        return sealed

    def _in_order(self, kept: list[_Whole]) -> Iterator[_Whole]:
        """The lines, none before what its rows are.

        What rows are may stand in several lines, of which the first may be lost: a line that needs it then comes after
        the next one that has it. Where none has it, the events are kept without it.
        """
        known: set[int] = set()
        waiting: dict[int, list[_Whole]] = {}  # by one batch that each needs
        for whole in kept:
            yield from _placed(whole, known, waiting)
        for found in (known.union(*(whole.batches for some in waiting.values() for whole in some)), known):
            rest = [whole for some in waiting.values() for whole in some]
            waiting.clear()
            for whole in rest:
                unknown = whole.unknown(found)
                yield from _placed(self._without_rows(whole, unknown) if unknown else whole, known, waiting)

    def _without_rows(self, whole: _Whole, unknown: list[int]) -> _Whole:
        """The line without what the rows of some of its events are, which is noted."""
        events = [whole.commit.events[number] for number in unknown]
        these = counted([(event.path, event.port, event.step) for event in events])
        self.lost.append(
            f"{where(whole.place)}: what the rows of {these} are, since a lost line said it; they were kept"
        )
        entry = strict_json.unseal(whole.text, whole.place)
        entry.pop("crc", None)
        for number in unknown:
            entry["events"][number].pop("batch", None)
            for tensor in entry["events"][number]["tensors"]:
                tensor.pop("rows", None)
        text = strict_json.seal(strict_json.COMPACT.encode(entry))
        return _Whole(layout.parse_commit(text, whole.place), text, whole.place)

    def _manifests(self, old: Path, files: list[str]) -> list[Path]:
        """The manifests that are there, in order; the gaps between them are noted."""
        numbers = reader.manifest_numbers(files)
        for before, number in itertools.pairwise([-1, *numbers]):
            if number - before > 1:
                first, last = layout.manifest_name(before + 1), layout.manifest_name(number - 1)
                gap = f"{first}: it is" if first == last else f"{first} to {last}: they are"
                self.lost.append(f"{old.name}/{gap} missing; {UNREAD}")
        return [old / layout.manifest_name(number) for number in numbers]

    def _lines(self, old: Path, manifests: list[Path], named: set[str]) -> list[_Whole]:
        """The commits that are whole; ``named`` gets the shards that any line names."""
        seen: set[str] = set()
        kept = []
        for place, text in (line for one in manifests for line in self._read(one, is_last=one == manifests[-1])):
            try:
                commit = reader.parse_commit(text, place, seen)
            except FormatError as error:
                self._lose(place, [_reason(error, place)], guess(text, named))
                continue
            named |= {shard.file for shard in commit.shards}
            search = Search()
            for shard in commit.shards:
                search.check_shard(old, shard, commit)
            if search.problems:
                self._lose(place, [problem.partition(". ")[0] for problem in search.problems], held(commit.events))
                continue
            self.commits += 1
            self.sites.update((event.path, event.port) for event in commit.events if event.port != BATCH)
            kept.append(_Whole(commit, _sealed(text, place), place))
        return kept

    def _read(self, manifest: Place, *, is_last: bool) -> Iterator[tuple[layout.Line, bytes]]:
        """The lines that can be read; the others are noted, and do not end the search."""
        name = f"{manifest.parent.name}/{manifest.name}"
        number = 1
        try:
            with open_regular(manifest) as file:
                for number in itertools.count(1):
                    text = file.readline(layout.MAX_LINE + 1)
                    if len(text) > layout.MAX_LINE:
                        self.lost.append(f"{name}, line {number}: it has more than {layout.MAX_LINE} bytes; {UNREAD}")
                        while text and not text.endswith(b"\n"):
                            text = file.readline(layout.MAX_LINE)
                        continue
                    if not text.endswith(b"\n"):
                        if text and is_last:
                            self.left_out.append(f"{name}: its last line, which is unfinished")
                        elif text:  # the next one was begun when this one was complete
                            self.lost.append(f"{name}, line {number}: its end is missing; {guess(text, set())}")
                        return
                    yield layout.Line(manifest, number), text
        except (FormatError, OSError) as error:
            self.lost.append(f"{name}, from line {number} on: {_reason(error, manifest)}; {UNREAD}")

    def _lose(self, place: layout.Line, problems: Iterable[str], held: str) -> None:
        shown = "; ".join(problem.replace(f"{self._old}{os.sep}", "") for problem in problems)
        self.lost.append(f"{where(place)}: {shown}; {held}")


class _Whole(NamedTuple):
    """A commit that is whole, its line, and where that stood."""

    commit: Commit
    text: bytes
    place: layout.Line

    @property
    def batches(self) -> set[int]:
        """What it says of rows: the orders of these events."""
        return {event.order for event in self.commit.events if event.port == BATCH}

    def unknown(self, known: set[int]) -> list[int]:
        """Numbers of its events whose rows are said neither in other lines, as given, nor before them in this one."""
        found, so_far = [], set[int]()
        for number, event in enumerate(self.commit.events):
            if event.batch is not None and event.batch not in known and event.batch not in so_far:
                found.append(number)
            if event.port == BATCH:
                so_far.add(event.order)
        return found


def _placed(whole: _Whole, known: set[int], waiting: dict[int, list[_Whole]]) -> Iterator[_Whole]:
    """The line and those that have waited for it; none if it has to wait itself."""
    ready = deque([whole])
    while ready:
        one = ready.popleft()
        if unknown := one.unknown(known):
            batch = one.commit.events[unknown[0]].batch
            assert batch is not None
            waiting.setdefault(batch, []).append(one)
            continue
        yield one
        for order in one.batches - known:
            known.add(order)
            ready += waiting.pop(order, [])


# ---------------------------------------------------------------- small things


class _OtherVersion(Exception):
    """The recording is sound, and not ours to change."""


def _refuse_other_version(text: bytes, place: Path) -> None:
    try:
        version = strict_json.unseal(text, place).get("version")
    except FormatError:
        return
    if type(version) is int and version != layout.VERSION:
        try:
            parse_head(text, place)
        except FormatError as error:
            raise _OtherVersion(str(error)) from None


def _sealed(text: bytes, place: object) -> bytes:
    """The line with a checksum; one that somebody has taken out is put back."""
    return text if strict_json.is_sealed(text) else strict_json.seal(_compact(text, place))


def _compact(text: bytes, place: object) -> str:
    return strict_json.COMPACT.encode(strict_json.unseal(text, place))


def _reason(error: Exception, place: object) -> str:
    """What is wrong, without the place and the advice."""
    return str(error).removeprefix(f"{place}: ").partition(". ")[0]


def _is_draft(name: str) -> bool:
    return layout.DRAFT_NAME.fullmatch(name) is not None


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(old, new)
        with open(new, "rb+") as file:
            os.fsync(file.fileno())
