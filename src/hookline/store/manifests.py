"""Finding the manifests of a recording, and reading their lines."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from hookline.store import format as layout
from hookline.store.format import HEAD, MANIFEST, Commit
from hookline.store.remote import Place, Remote, remote_of
from hookline.store.shard import open_regular
from hookline.store.strict_json import fault
from hookline.store.structure import decode

_OTHER_FOLDER = "Pass a folder that Hookline wrote, such as run.hookline."


def writer_number(folder: Place) -> int:
    """The number of a writer, which the name of its folder begins with."""
    return int(folder.name[1:].partition("-")[0])


def place_of_recording(path: str | os.PathLike[str] | Remote) -> Place:
    """The absolute path of a recording, since its shards may be opened from another working directory; or its URL.

    Raises:
        FormatError: There is none.
    """
    remote = remote_of(path)
    if remote is not None:
        return _check_remote(remote)
    assert not isinstance(path, Remote)
    folder = Path(os.path.abspath(path))
    if not os.path.lexists(folder):
        raise fault(folder, "there is no recording of that name", "Check the path.")
    if folder.name in (HEAD, MANIFEST) or not folder.is_dir():
        raise fault(folder, "this is not a folder, a recording is one", "Pass the folder, such as run.hookline.")
    if not os.path.lexists(folder / HEAD):
        advice = f"Pass its parent, {folder.parent}." if (folder.parent / HEAD).exists() else _OTHER_FOLDER
        raise fault(folder, f"this folder is not a Hookline recording (it has no {HEAD})", advice)
    return folder


def _check_remote(place: Remote) -> Remote:
    if (place / HEAD).size() is not None:
        return place
    if place.name in (HEAD, MANIFEST):
        raise fault(place, "this is one object, a recording is several", f"Pass what they lie in, {place.parent}.")
    if place.children():
        raise fault(place, f"this is not a Hookline recording (it has no {HEAD})", "Pass the URL of one.")
    advice = "Check the URL, the name of the bucket, and AWS_ENDPOINT_URL."
    raise fault(place, "there is no recording of that name", advice)


def writers(folder: Place) -> Iterator[Place]:
    """The writers' folders that have a manifest, be it a later one, in order; other things are not ours to judge."""
    if isinstance(folder, Remote):
        found = (folder / name for name in sorted(folder.children()) if layout.WRITER_NAME.fullmatch(name))
        yield from (path for path in found if manifest_numbers(path.children()))
        return
    for path in sorted(folder.iterdir()):
        if layout.WRITER_NAME.fullmatch(path.name):
            if path.is_symlink() or not path.is_dir():
                raise fault(path, "this is not a plain folder", "Copy the recording with its links resolved: cp -rL.")
            if os.path.lexists(path / MANIFEST) or manifest_numbers(os.listdir(path)):
                yield path


def manifest_numbers(names: Iterable[str]) -> list[int]:
    """The numbers of the manifests among the names in a writer's folder, in order; 0 is that of the first."""
    found = {name: layout.LATER_MANIFEST.fullmatch(name) for name in names}
    numbers = {name: 0 if later is None else int(later[1]) for name, later in found.items()}
    return sorted(number for name, number in numbers.items() if name == layout.manifest_name(number))


def manifests(writer: Place) -> list[Place]:
    """The manifests of a writer's folder, in order: one, or several of an object store or a copy of that.

    A manifest that another one follows does not grow any more, so what is read after this call is all of it.

    Raises:
        FormatError: One of them is missing.
    """
    names = list(writer.children()) if isinstance(writer, Remote) else os.listdir(writer)
    numbers = manifest_numbers(names) or [0]
    for wanted, number in enumerate(numbers):
        if number != wanted:
            advice = "Copy the whole recording again; what is left of it, `hookline repair` saves, on a disk."
            raise fault(writer / layout.manifest_name(wanted), "this part of the recording is missing", advice)
    return [writer / layout.manifest_name(number) for number in numbers]


def parse_commit(text: bytes, place: layout.Line, seen: set[str]) -> Commit:
    """Read one line of a manifest, and check all of it that can be checked without its shards.

    Args:
        text: The line.
        place: Where it stands.
        seen: What earlier lines of the manifest have of their own, which this one adds to: their shards, or a digest of
            a line without any.

    Raises:
        FormatError: The line is damaged or hostile, names a shard that another line names, or is there twice.
    """
    commit = layout.parse_commit(text, place)
    for index, line in enumerate(commit.events):
        decode(line.structure, range(len(line.tensors)), place._replace(event=index))
    names = {shard.file for shard in commit.shards}
    if names & seen:
        raise fault(place, f"it names the shard {min(names & seen)}, which an earlier line names")
    if not names:
        names = {hashlib.blake2b(text, digest_size=16).hexdigest()}
        if names & seen:
            raise fault(place, "it is the same as an earlier line, so that its events would be there twice")
    seen |= names
    return commit


def lines(manifest: Place, torn: list[Place], offset: int = 0, number: int = 0) -> Iterator[tuple[layout.Line, bytes]]:
    """The whole lines of a manifest, and where they stand.

    Args:
        manifest: The file.
        torn: Gets the manifest added when its last line has no newline: its writer was killed, or is at it.
        offset: Bytes that are passed over.
        number: Lines in these bytes.

    Raises:
        FormatError: A line is too long, or the file has less than ``offset`` bytes.
    """
    with open_regular(manifest) as file:
        if offset > file.seek(0, os.SEEK_END):
            raise fault(manifest, f"it had {offset} bytes and has become shorter", "Open the recording again.")
        file.seek(offset)
        for count in itertools.count(number + 1):
            line = file.readline(layout.MAX_LINE + 1)
            if len(line) > layout.MAX_LINE:
                raise fault(manifest, f"a line has more than {layout.MAX_LINE} bytes")
            if not line.endswith(b"\n"):
                torn += [manifest] if line else []
                return
            yield layout.Line(manifest, count), line


def lines_from(
    places: list[Place], torn: list[Place], first: int = 0, offset: int = 0, number: int = 0
) -> Iterator[tuple[int, layout.Line, bytes]]:
    """The whole lines of several manifests, from a place in the first of them on, with the number of the manifest.

    Raises:
        FormatError: As for `lines`, or a manifest that is not the last one has an unfinished line.
    """
    for part in range(first, len(places)):
        for place, text in lines(places[part], torn, offset, number):
            yield part, place, text
        if torn and part + 1 < len(places):
            raise fault(places[part], "its last line is cut off, and another manifest follows")
        offset = number = 0
