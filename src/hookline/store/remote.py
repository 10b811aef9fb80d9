"""Places on an object store: what a URL such as ``s3://bucket/run.hookline`` names, reached through fsspec. No torch.

An object is put as a whole or not at all, and is read by ranges. There is no append, no rename and no folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hookline.errors import HooklineError, OptionError
from hookline.extras import extra
from hookline.store.strict_json import fault

__all__ = ["Place", "Remote", "refuse_remote", "remote_of"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.+)", re.DOTALL)
_ON_DISK = ("file", "local")
_BUFFER = 1 << 20
_REFUSED = "Check the credentials, and that they allow to list, read and put objects there."
_LOST = "Check the URL, the network and AWS_ENDPOINT_URL. What was committed before is complete and can be read."


@dataclasses.dataclass(frozen=True, order=True)
class Remote:
    """An object, or the common beginning of several. Only its URL is kept, so it goes to other processes.

    Attributes:
        url: Such as ``s3://bucket/run.hookline``, without a slash at its end.
    """

    url: str

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """What stands behind the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        """What stands before it."""
        return Remote(self.url.rpartition("/")[0])

    def size(self) -> int | None:
        """Bytes of the object; None where there is none.

        Raises:
            FormatError: The store cannot be asked.
        """
        try:
            with self._asking() as (files, path):
                found = files.info(path)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def children(self) -> dict[str, int]:
        """Names right below it, and the sizes of those that are objects; 0 for the others.

        Raises:
            FormatError: The store cannot be asked.
        """
        try:
            with self._asking() as (files, path):
                found = files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        listed = {str(entry["name"]).rstrip("/"): int(entry["size"] or 0) for entry in found}
        inside = f"{path.strip('/')}/"
        return {
            name.rpartition("/")[2]: size
            for name, size in listed.items()
            if f"{name.strip('/')}/".startswith(inside) and name.strip("/") != path.strip("/")
        }

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` to before ``end``, which have to be in the object.

        Raises:
            FormatError: They are not, or the store cannot be asked.
        """
        if begin == end:
            return b""
        try:
            with self._asking() as (files, path):
                found = bytes(files.cat_file(path, start=begin, end=end))
        except FileNotFoundError:
            raise self._missing() from None
        if len(found) != end - begin:
            raise fault(self, f"bytes {begin} to {end} were asked for, {len(found)} bytes came")
        return found

    def open(self, *, buffer: int = _BUFFER, size: int | None = None) -> BinaryIO:
        """The object as a file that is read in pieces of ``buffer`` bytes.

        Args:
            buffer: Bytes of a request.
            size: Bytes of the object, where that is known.

        Raises:
            FormatError: There is none, or the store cannot be asked.
        """
        found = self.size() if size is None else size
        if found is None:
            raise self._missing()
        return io.BufferedReader(_Ranges(self, found), buffer)

    def put(self, data: bytes, *, new: bool = False) -> None:
        """Make or replace the object, as a whole.

        Args:
            data: What it is to hold.
            new: Only if there is none.

        Raises:
            FileExistsError: There is one, and ``new`` is True.
            FormatError: The store refuses or cannot be reached, so that nobody knows whether it is there.
        """
        try:
            with self._asking() as (files, path):
                files.pipe_file(path, data, mode="create" if new else "overwrite")
        except FileNotFoundError as error:
            advice = "Make the bucket first, or check the URL and AWS_ENDPOINT_URL."
            raise fault(self, f"it cannot be written, its bucket does not exist ({error})", advice) from error

    def delete(self) -> None:
        """Delete the object, if there is one.

        Raises:
            FormatError: The store refuses or cannot be reached.
        """
        with contextlib.suppress(FileNotFoundError), self._asking() as (files, path):
            files.rm_file(path)

    def _missing(self) -> HooklineError:
        return fault(self, "this part of the recording is missing", "Copy the whole recording again, with all objects.")

    @contextlib.contextmanager
    def _asking(self) -> Iterator[tuple[Any, str]]:
        """The file system and the path in it; its errors as one that names the URL and says what to do."""
        files = _file_system(self.url)
        try:
            yield files, files._strip_protocol(self.url)
        except (FileNotFoundError, FileExistsError, NotADirectoryError, HooklineError):
            raise
        except Exception as error:  # each store has errors of its own
            told = f"{type(error).__name__}: {error}"
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                raise fault(self, f"the store refuses ({told})", _REFUSED) from error
            raise fault(self, f"the store cannot be reached ({told})", _LOST) from error


Place = Path | Remote
"""Where a recording or a part of it lies."""


class _Ranges(io.RawIOBase):
    """An object as a file without a buffer."""

    def __init__(self, place: Remote, size: int) -> None:
        self._place, self._size, self._at = place, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        found = self._place.read(self._at, max(self._at, end))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def remote_of(path: object) -> Remote | None:
    """The place that a URL names; None for a path on a disk.

    Raises:
        OptionError: No recording can lie there.
    """
    if isinstance(path, Remote):
        return path
    found = _URL.fullmatch(path) if isinstance(path, str) else None
    if found is None:
        return None
    protocol, rest = found.groups()
    if protocol.lower() in _ON_DISK:
        raise OptionError(f"{path}: a URL of a file; pass the path alone, without {protocol}://.")
    if "::" in rest or not rest.strip("/"):
        raise OptionError(f"{path}: no URL of a recording; pass one such as s3://bucket/run.hookline.")
    return Remote(f"{protocol}://{rest.rstrip('/')}")


def refuse_remote(path: object, what: str) -> None:
    """Complain about a URL where only a disk will do."""
    if isinstance(path, Remote) or (isinstance(path, str) and _URL.fullmatch(path)):
        raise OptionError(
            f"{path}: {what} works on a disk only. Copy the recording with a client of the store, such as `aws s3 cp "
            "--recursive`, and pass a path."
        )


_file_systems: dict[tuple[int, str], Any] = {}
"""By process and root: what reaches a store has threads and sockets, which a forked process must not use."""


def _file_system(url: str) -> Any:
    protocol, _, rest = url.partition("://")
    key = os.getpid(), f"{protocol}://{rest.partition('/')[0]}"
    if key not in _file_systems:
        _file_systems[key] = _make(protocol, url)
    return _file_systems[key]


def _make(protocol: str, url: str) -> Any:
    name = "s3" if protocol in ("s3", "s3a") else protocol
    connect: Callable[..., Any] = extra("fsspec.core", "s3", f"{protocol}://").url_to_fs
    if name == "s3":
        extra("s3fs", "s3", f"{protocol}://")
    try:
        return connect(url, use_listings_cache=False)[0]
    except ImportError as error:
        raise HooklineError(f"{protocol}:// needs a package of its own: {error}") from error
    except ValueError as error:
        raise OptionError(f"{url}: fsspec knows no such place: {error}") from error
    except Exception as error:  # each store has errors of its own
        raise fault(url, f"the store cannot be reached ({type(error).__name__}: {error})", _LOST) from error
