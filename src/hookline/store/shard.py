"""One shard: a safetensors file with the tensors of a flush, written in one go and read by mapping it into memory."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.store import header
from hookline.store.crc32c import crc32c
from hookline.store.dtypes import STORAGE
from hookline.store.format import ShardLine, TensorLine, draft_name
from hookline.store.remote import Place, Remote
from hookline.store.strict_json import DAMAGED, fault
from hookline.store.tensors import Sink, Stage, Stored, write_all

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORAGE if hasattr(torch, name)}
_WORTH_IT = 256 << 10
"""Bytes of a write from which on the disk is told to begin at once."""
_RESOLVE = "Copy the recording with its links resolved: cp -rL."
_COPY_WHOLE = "Copy the whole folder again, with all its files."
_TOO_MANY_MAPS = (
    "The process has too many mapped files: raise vm.max_map_count, or read fewer steps at a time, each part with "
    "hookline.load(...).select(steps=...)."
)


class _Summed:
    """A file that is written from front to back, and the checksum of what was written."""

    def __init__(self, file: Sink) -> None:
        self._file = file
        self.nbytes = self.crc32c = 0

    def write(self, data: memoryview, /) -> int:
        count = self._file.write(data)
        self.crc32c = crc32c(data[:count], self.crc32c)
        self.nbytes += count
        return count


class _Eager:
    """A file that the system begins to bring to the disk while more is written, instead of when it is synced."""

    def __init__(self, file: FileIO) -> None:
        self._file, self._end = file, 0

    def write(self, data: memoryview, /) -> int:
        count = self._file.write(data)
        if count >= _WORTH_IT and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # some file systems do not know it
                # on Linux, what is dirty in the range is written in the background, and stays in memory meanwhile
                os.posix_fadvise(self._file.fileno(), self._end, count, os.POSIX_FADV_DONTNEED)
        self._end += count
        return count


def write_shard(path: Path, tensors: Iterable[tuple[str, Stored]]) -> ShardLine:
    """Write named tensors as a safetensors file and wait until the disk has it; its name, the folder has to be synced.

    Until it is complete it has a temporary name. A failure may leave that behind.

    Returns:
        Its entry in the manifest; the checksum is that of what was to be written, not of what the disk made of it.

    Raises:
        OSError: It could not be written.
        FormatError: There are too many names for one file.
    """
    draft = path.with_name(draft_name(path.name))
    with open(draft, "wb", buffering=0) as file:
        entry = write_into(_Eager(file), tensors, path)
        os.fsync(file.fileno())
    os.replace(draft, path)
    return entry


def write_into(file: Sink, tensors: Iterable[tuple[str, Stored]], path: Place) -> ShardLine:
    """Write named tensors as a safetensors file of the name of ``path``.

    Raises:
        OSError: It could not be written.
        FormatError: There are too many names for one file.
    """
    # from the largest element to the smallest, so that each begins at a multiple of its size
    ordered = sorted(tensors, key=lambda named: -named[1].storage.itemsize)
    start = header.build(((name, kept.storage.code, kept.storage.shape(kept.shape)) for name, kept in ordered), path)
    summed = _Summed(file)
    write_all(summed, start)
    on_cuda = any(kept.data is not None and kept.data.is_cuda for _, kept in ordered)
    stage = Stage(summed, sum(kept.nbytes for _, kept in ordered), pinned=on_cuda)
    with torch.no_grad():
        for _, kept in ordered:
            if kept.data is not None:
                stage.add(kept.data)
    stage.flush()
    return ShardLine(path.name, summed.nbytes, summed.crc32c)


def open_regular(path: Place) -> BinaryIO:
    """Open a file inside a recording for reading.

    Raises:
        FormatError: It is missing, cannot be read, or is not a plain file: a link may lead out of the recording.
    """
    if isinstance(path, Remote):
        return path.open()
    check_regular(path)
    try:
        return open(path, "rb")
    except OSError as error:
        raise fault(path, f"it cannot be read ({error.strerror})", "Check its permissions.") from error


def check_regular(path: Path) -> os.stat_result:
    """Size and identity of a plain file inside a recording; complains about anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise fault(path, "this part of the recording is missing", _COPY_WHOLE) from None
    except (OSError, ValueError) as error:
        raise fault(path, f"it cannot be read ({error})", "Check its permissions.") from error
    if stat.S_ISLNK(found.st_mode):
        raise fault(path, "it is a link, which could lead out of the recording", _RESOLVE)
    if not stat.S_ISREG(found.st_mode):
        raise fault(path, "it is not a plain file", _COPY_WHOLE)
    return found


class Shard:
    """A shard that is opened when its first tensor is asked for.

    Args:
        path: The file. It is checked to exist, and remembered well enough to notice when it is exchanged.
        size: Bytes that it has to have.

    Raises:
        FormatError: It is missing, not a plain file, or of another size.
    """

    path: Place

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._seen = _identity(check_regular(path))
        if self._seen[0] != size:
            found = f"it has {self._seen[0]} bytes, its manifest says {size}"
            raise fault(path, found, f"It is truncated. {DAMAGED}" if self._seen[0] < size else DAMAGED)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which maps the file itself."""
        return {"path": self.path, "size": self.size, "_seen": self._seen}

    def tensor(self, line: TensorLine) -> Tensor:
        """The tensor of a manifest line: memory of its own, mapped privately from the file.

        Writing into it is allowed and does not reach the file.

        Raises:
            FormatError: The file is truncated, damaged or hostile, or does not hold that tensor.
        """
        dtype, (begin, end) = torch_dtype(line.dtype, self.path), self._place(line)
        count = (end - begin) // dtype.itemsize
        if not count:  # torch maps nothing where there is nothing
            return torch.frombuffer(bytearray(dtype.itemsize), dtype=dtype)[:0].view(line.shape)
        data = self._mapped
        if begin % dtype.itemsize:  # not aligned: not written by Hookline
            data, begin = data[begin : begin + count * dtype.itemsize].copy(), 0
        return torch.frombuffer(data, dtype=dtype, count=count, offset=begin).view(line.shape)

    def span(self, line: TensorLine) -> tuple[npt.NDArray[np.uint8], int] | None:
        """The file as bytes, mapped privately, and where in it the tensor begins; None where it cannot be mapped.

        Raises:
            FormatError: As for ``tensor``.
        """
        return self._mapped, self._place(line)[0]

    def _place(self, line: TensorLine) -> tuple[int, int]:
        found = self.find(line)
        return self.contents.start + found.begin, self.contents.start + found.end

    def find(self, line: TensorLine) -> header.Entry:
        """The place of the tensor of a manifest line.

        Raises:
            FormatError: The header is damaged or hostile, or does not hold that tensor.
        """
        found, storage = self.contents.entries.get(line.name), STORAGE[line.dtype]
        if found is None:
            raise fault(self.path, f"it has no tensor named {line.name!r}, which its manifest names")
        wanted = storage.shape(line.shape)
        if found.code != storage.code or found.shape != wanted:
            has = f"{found.code} {list(found.shape)}"
            raise fault(self.path, f"tensor {line.name!r} is {has}, its manifest says {storage.code} {list(wanted)}")
        return found

    @cached_property
    def contents(self) -> header.Header:
        """What the file says it holds.

        Raises:
            FormatError: The header is damaged or hostile.
        """
        with open_regular(self.path) as file:
            if _identity(os.fstat(file.fileno())) != self._seen:
                raise fault(self.path, "it was changed since the recording was opened", "Open the recording again.")
            try:
                return header.read(file, self.size, self.path)
            except OSError as error:
                raise fault(self.path, f"it cannot be read ({error})", "Check its disk.") from error

    @cached_property
    def _mapped(self) -> npt.NDArray[np.uint8]:
        """The file in memory, copied on write. torch closes its handle, Python's mmap would keep one for each shard."""
        try:
            return torch.from_file(str(self.path), shared=False, size=self.size, dtype=torch.uint8).numpy()
        except RuntimeError as error:
            advice = _TOO_MANY_MAPS if os.strerror(errno.ENOMEM) in str(error) else "Open the recording again."
            raise fault(self.path, f"it cannot be mapped into memory ({error})", advice) from error


def meta_tensor(line: TensorLine, place: object) -> Tensor:
    """A tensor of which only shape and dtype were kept."""
    return torch.empty(line.shape, dtype=torch_dtype(line.dtype, place), device="meta")


def torch_dtype(name: str, place: object) -> torch.dtype:
    """The dtype of that name.

    Raises:
        FormatError: This release of torch has none.
    """
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise fault(place, f"torch {torch.__version__} has no dtype {name}", "Update PyTorch to read this recording.")
    return dtype


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev
