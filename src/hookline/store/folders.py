"""Making, joining and replacing the folder of a recording so that at no moment a half of one stands in its place.

A new recording is made in a hidden folder next to its place and renamed. An old one is taken away only when it is
certain to be a recording and nothing else.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import warnings
from pathlib import Path

from hookline.errors import OptionError
from hookline.store import format as layout
from hookline.store.format import END, HEAD, MANIFEST, MAX_HEAD, WRITER_NAME, parse_head
from hookline.store.remote import Place, Remote, remote_of
from hookline.store.shard import open_regular
from hookline.store.strict_json import fault
from hookline.store.tensors import write_all

_OTHER_NAME = "Choose another name"
_SAME = {"sites": "sites", "structure": "modules or parameters"}
"""What the parts of a recording have in common where it is told, and what to call it."""


def place_of(folder: str | os.PathLike[str] | Remote) -> Place:
    """The folder of a recording, as `on_disk` finds it; or what its URL names.

    Raises:
        OptionError: No recording can lie at that URL.
    """
    remote = remote_of(folder)
    return on_disk(folder) if remote is None else remote  # type: ignore[arg-type]


def on_disk(folder: str | os.PathLike[str]) -> Path:
    """The folder of a recording, also after the working directory changes.

    A link to one is followed, so that what the link names is replaced and not the link.
    """
    path = Path(os.path.abspath(folder))
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def names_in(folder: Place) -> list[str]:
    """What lies right in a folder, in no order."""
    return list(folder.children()) if isinstance(folder, Remote) else os.listdir(folder)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def read_head(folder: Place) -> bytes:
    """The text of ``recording.json``.

    Raises:
        FormatError: It is missing, no plain file, or too large to be one.
    """
    return read_small(folder / HEAD)


def read_small(path: Place) -> bytes:
    """The text of ``recording.json`` or ``end.json``.

    Raises:
        FormatError: It is missing, no plain file, or too large to be one.
    """
    with open_regular(path) as file:
        # of the open file: another may have its name by now; and reading takes memory for as much as is asked for
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > MAX_HEAD:
            raise fault(path, f"it has {size} bytes, at most {MAX_HEAD} are read")
        return file.read(size)


def is_taken(folder: Path) -> bool:
    """Whether a recording stands there already.

    Raises:
        FormatError: Something else stands there.
    """
    if not os.path.lexists(folder):
        return False
    if not folder.is_dir():
        raise fault(folder, "this is a file, a recording is a folder", f"{_OTHER_NAME}; the file was left as it is.")
    if not os.path.lexists(folder / HEAD):
        advice = f"{_OTHER_NAME}; the folder was left as it is."
        raise fault(folder, f"this folder exists and is not a Hookline recording (it has no {HEAD})", advice)
    parse_head(read_head(folder), folder / HEAD)
    return True


def refuse_taken(folder: Path) -> None:
    """Complain when something stands at the place of a new recording."""
    if is_taken(folder):
        raise OptionError(f"{folder}: a recording of that name exists. {_OTHER_NAME}, or pass overwrite=True.")


def check_same(folder: Place, head: bytes) -> None:
    """Complain when a recording that is to be joined is of something else than what joins it.

    Args:
        folder: The recording.
        head: What its ``recording.json`` would be, were it made now.

    Raises:
        OptionError: It has other sites, or its model has other modules or parameters.
        FormatError: Its ``recording.json`` is damaged.
    """
    there, here = (parse_head(text, folder / HEAD)[0] for text in (read_head(folder), head))
    for name, what in _SAME.items():
        if name in there and name in here and there[name] != here[name]:
            raise OptionError(
                f"{folder}: a recording of that name exists, with other {what}: {_short(there[name])} there, "
                f"{_short(here[name])} here. {_OTHER_NAME}, or delete it first."
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def check_replaceable(folder: Path) -> None:
    """Complain unless everything in the folder was written by Hookline, so that deleting it loses nothing else."""
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink() or not _is_ours(path.relative_to(folder).parts):
                advice = f"Move it elsewhere, or choose another name; {folder} was left as it is."
                raise fault(path, "this is not part of a recording, and overwrite=True would delete it", advice)


def _is_ours(parts: tuple[str, ...]) -> bool:
    if len(parts) == 1:
        return parts[0] == HEAD or WRITER_NAME.fullmatch(parts[0]) is not None
    patterns = layout.SHARD_NAME, layout.DRAFT_NAME, layout.LATER_MANIFEST
    known = (pattern.fullmatch(parts[-1]) for pattern in patterns)
    return len(parts) == 2 and (parts[1] in (MANIFEST, END, f".{END}.tmp") or any(known))


def parts_of(folder: Path, writer: int) -> list[Path]:
    """What a recording holds of the writer with that number: one folder, or several of attempts at the same time."""
    prefix = layout.writer_prefix(writer)
    found = (path for path in folder.iterdir() if path.name.startswith(prefix))
    return sorted(path for path in found if WRITER_NAME.fullmatch(path.name))


# ---------------------------------------------------------------- writing


def hidden(folder: Path, ending: str) -> Path:
    """A free hidden name next to a folder."""
    return folder.with_name(f".hookline-{secrets.token_hex(6)}.{ending}")


def make_draft(folder: Path, head: bytes, writer: str) -> Path:
    """A complete recording without events, in a hidden folder next to its later place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = hidden(folder, "new")
    try:
        draft.mkdir()
        write_synced(draft / HEAD, head)
        add_writer(draft, writer)
    except BaseException:
        remove(draft)
        raise
    return draft


def add_writer(folder: Path, writer: str) -> None:
    """Make a writer's folder, of a new name, with an empty manifest."""
    (folder / writer).mkdir()
    try:
        write_synced(folder / writer / MANIFEST, b"")
        sync_folder(folder / writer)
        sync_folder(folder)
    except BaseException:
        remove(folder / writer)
        raise


def write_head(folder: Path, head: bytes) -> None:
    """Exchange what a recording says of itself; a reader sees the old text or the new one."""
    write_whole(folder / HEAD, head, draft=hidden(folder, "head"))


def write_whole(path: Path, data: bytes, *, draft: Path | None = None) -> None:
    """Write a small file in a folder of ours, or exchange it; a reader sees nothing half-written.

    Args:
        path: The file.
        data: What it is to hold.
        draft: Where it is written before it gets its name; next to it by default.
    """
    draft = path.with_name(f".{path.name}.tmp") if draft is None else draft
    try:
        write_synced(draft, data)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def publish(draft: Path, folder: Path) -> None:
    """Give a draft its name. Nothing may stand there."""
    os.rename(draft, folder)
    sync_folder(folder.parent)


def replace(draft: Path, folder: Path) -> None:
    """Put a draft in the place of a recording, and delete that."""
    old = hidden(folder, "old")
    os.rename(folder, old)
    try:
        os.rename(draft, folder)
    except BaseException:
        os.rename(old, folder)
        raise
    try:
        sync_folder(folder.parent)
    finally:
        remove(old)
    if old.exists():
        warnings.warn(f"the replaced recording could not be deleted: {old}. Delete it by hand.", stacklevel=3)


def remove(folder: Path) -> None:
    """Delete a folder of ours, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_empty(folder: Path) -> None:
    """Delete a recording that no writer is in, as far as that is possible."""
    if os.listdir(folder) != [HEAD]:
        return
    old = hidden(folder, "old")
    os.rename(folder, old)
    if os.listdir(old) == [HEAD]:
        remove(old)
    else:  # somebody has joined it meanwhile
        os.rename(old, folder)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it; its name, the folder has to be synced."""
    with open(path, "xb", buffering=0) as file:
        write_all(file, data)
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows the names in a folder; systems and file systems that cannot wait do without."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)
