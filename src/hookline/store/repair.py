"""What is left of a damaged recording as a new one; the damaged one stays as it is."""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hookline.errors import FormatError, OptionError
from hookline.store import folders, reader, strict_json
from hookline.store import format as layout
from hookline.store.format import HEAD, MANIFEST, Commit, EventLine, ModuleInfo, dump_head, parse_head
from hookline.store.remote import Place, refuse_remote
from hookline.store.shard import open_regular
from hookline.store.strict_json import fault
from hookline.store.verify import Search

_MOST_NAMED = 5
_UNREAD = "what it held cannot be read"


class Repair(NamedTuple):
    """What was saved, and what was not.

    Attributes:
        commits: Commits in the new recording.
        events: Their events.
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
        sites: Events that were copied, by path and port.
        lost: As of `Repair`.
        left_out: As of `Repair`.
    """

    def __init__(self, old: Path, draft: Path) -> None:
        self.commits = 0
        self.sites: Counter[tuple[str, str]] = Counter()
        self.lost: list[str] = []
        self.left_out: list[str] = []
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
                "model, its classes and numbers of parameters, the coverage and what else was known"
            )
            return None
        return text if strict_json.is_sealed(text) else dump_head(info, modules)

    def _new_head(self) -> bytes:
        paths = dict.fromkeys(path for path, _ in self.sites)
        sites = [f"{path or '(root)'}:{port}" for path, port in self.sites]
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
        if MANIFEST not in files:
            if shards:
                self.lost.append(f"{old.name}: it has no {MANIFEST}, so {len(shards)} shards cannot be read")
            return
        named: set[str] = set()
        kept = self._lines(old, named)
        self.left_out += [f"{old.name}/{name}: no line names this shard" for name in shards if name not in named]
        new = self._draft / old.name
        new.mkdir()
        for commit, _ in kept:
            for shard in commit.shards:
                _link(old / shard.file, new / shard.file)
        folders.write_synced(new / MANIFEST, b"".join(text for _, text in kept))
        folders.sync_folder(new)

    def _lines(self, old: Path, named: set[str]) -> list[tuple[Commit, bytes]]:
        """The commits that are whole, with their lines; ``named`` gets the shards that any line names."""
        seen: set[str] = set()
        kept = []
        for place, text in itertools.chain.from_iterable(map(self._read, reader.manifests(old))):
            try:
                commit = reader.parse_commit(text, place, seen)
            except FormatError as error:
                self._lose(place, [_reason(error, place)], _guess(text, named))
                continue
            named |= {shard.file for shard in commit.shards}
            search = Search()
            for shard in commit.shards:
                search.check_shard(old, shard, commit)
            if search.problems:
                self._lose(place, [problem.partition(". ")[0] for problem in search.problems], _held(commit.events))
                continue
            self.commits += 1
            self.sites.update((event.path, event.port) for event in commit.events)
            kept.append((commit, _sealed(text, place)))
        return kept

    def _read(self, manifest: Place) -> Iterator[tuple[layout.Line, bytes]]:
        """The lines that can be read; the others are noted, and do not end the search."""
        name = f"{manifest.parent.name}/{manifest.name}"
        number = 1
        try:
            with open_regular(manifest) as file:
                for number in itertools.count(1):
                    text = file.readline(layout.MAX_LINE + 1)
                    if len(text) > layout.MAX_LINE:
                        self.lost.append(f"{name}, line {number}: it has more than {layout.MAX_LINE} bytes; {_UNREAD}")
                        while text and not text.endswith(b"\n"):
                            text = file.readline(layout.MAX_LINE)
                        continue
                    if not text.endswith(b"\n"):
                        self.left_out += [f"{name}: its last line, which is unfinished"] * bool(text)
                        return
                    yield layout.Line(manifest, number), text
        except (FormatError, OSError) as error:
            self.lost.append(f"{name}, from line {number} on: {_reason(error, manifest)}; {_UNREAD}")

    def _lose(self, place: layout.Line, problems: Iterable[str], held: str) -> None:
        where = f"{place.manifest.parent.name}/{place.manifest.name}, line {place.number}"
        shown = "; ".join(problem.replace(f"{self._old}{os.sep}", "") for problem in problems)
        self.lost.append(f"{where}: {shown}; {held}")


# ---------------------------------------------------------------- what a lost line held


def _held(events: Iterable[EventLine]) -> str:
    return _listing([(event.path, event.port, event.step) for event in events])


def _listing(places: list[tuple[Any, Any, Any]]) -> str:
    """How many events, of which steps and sites."""
    if not places:
        return "it held no events"
    sites = list(dict.fromkeys(f"{path or '(root)'}:{port}" for path, port, _ in places))
    more = f" and {len(sites) - _MOST_NAMED} more sites" if len(sites) > _MOST_NAMED else ""
    steps = sorted({step for _, _, step in places})
    span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    count = f"{len(places)} event{'s' if len(places) > 1 else ''}"
    return f"it held {count} of {span} at {', '.join(sites[:_MOST_NAMED])}{more}"


def _guess(text: bytes, named: set[str]) -> str:
    """What a damaged line still says of its events; the shards that it names are added."""
    try:
        entry = strict_json.parse(text.rstrip(b"\n"), "")
        named |= {shard["file"] for shard in entry["shards"] if type(shard["file"]) is str}
        places = [(event["path"], event["port"], event["step"]) for event in entry["events"]]
    except (FormatError, LookupError, TypeError):
        return _UNREAD
    if not all(type(path) is type(port) is str and type(step) is int for path, port, step in places):
        return _UNREAD
    return f"{_listing(places)}, as far as can be told"


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
