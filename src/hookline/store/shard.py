"""One shard: a safetensors file with the tensors of a flush, written in one go and read by mapping it into memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.store import header
from hookline.store.dtypes import STORAGE
from hookline.store.format import TensorLine
from hookline.store.strict_json import fault
from hookline.store.tensors import Stage, Stored, write_all

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORAGE if hasattr(torch, name)}
_RESOLVE = "Copy the recording with its links resolved: cp -rL."
_COPY_WHOLE = "Copy the whole folder again, with all its files."


def write_shard(path: Path, tensors: Iterable[tuple[str, Stored]]) -> None:
    """Write named tensors as a safetensors file, and wait until the disk has it.

    Raises:
        OSError: It could not be written.
        FormatError: There are too many names for one file.
    """
    # from the largest element to the smallest, so that each begins at a multiple of its size
    ordered = sorted(tensors, key=lambda named: -named[1].storage.itemsize)
    start = header.build(((name, kept.storage.code, kept.storage.shape(kept.shape)) for name, kept in ordered), path)
    with open(path, "wb", buffering=0) as file:
        write_all(file, start)
        stage = Stage(file, sum(kept.nbytes for _, kept in ordered))
        with torch.no_grad():
            for _, kept in ordered:
                if kept.data is not None:
                    stage.add(kept.data)
        stage.flush()
        os.fsync(file.fileno())


def open_regular(path: Path) -> BinaryIO:
    """Open a file inside a recording for reading.

    Raises:
        FormatError: It is missing, cannot be read, or is not a plain file: a link may lead out of the recording.
    """
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

    Raises:
        FormatError: It is missing or not a plain file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = _identity(check_regular(path))

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which maps the file itself."""
        return {"path": self.path, "_seen": self._seen}

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._seen[0]

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

    def span(self, line: TensorLine) -> tuple[npt.NDArray[np.uint8], int]:
        """The file as bytes, mapped privately, and where in it the tensor begins.

        Raises:
            FormatError: As for ``tensor``.
        """
        return self._mapped, self._place(line)[0]

    def _place(self, line: TensorLine) -> tuple[int, int]:
        found = self._find(line)
        return self._header.start + found.begin, self._header.start + found.end

    def _find(self, line: TensorLine) -> header.Entry:
        found, storage = self._header.entries.get(line.name), STORAGE[line.dtype]
        if found is None:
            raise fault(self.path, f"it has no tensor named {line.name!r}, which its manifest names")
        wanted = storage.shape(line.shape)
        if found.code != storage.code or found.shape != wanted:
            has = f"{found.code} {list(found.shape)}"
            raise fault(self.path, f"tensor {line.name!r} is {has}, its manifest says {storage.code} {list(wanted)}")
        return found

    @cached_property
    def _header(self) -> header.Header:
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
            raise fault(self.path, f"it cannot be mapped into memory ({error})", "Open the recording again.") from error


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
