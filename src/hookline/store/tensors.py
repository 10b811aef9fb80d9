"""From any tensor to one that can be stored, and to its bytes."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hookline.errors import ArgumentError
from hookline.stats.pieces import has_memory
from hookline.store.dtypes import STORAGE, Storage

DENSE_LIMIT = 1 << 30
"""Bytes up to which a sparse tensor is stored dense; beyond, its dense form might not fit in memory."""
_STAGE, _PINNED = 1 << 20, 8 << 20
"""Bytes that are gathered before they are written: large enough for the disk, small enough for the cache; and those
that a CUDA device copies at once."""
_SMALL = 64 << 10
"""Bytes up to which tensors are gathered by one `torch.cat` for many of them: a copy of each has its own overhead."""
_WHOLE = {"U8": torch.uint8, "U16": torch.int16}


class Stored(NamedTuple):
    """A tensor as it is stored.

    Attributes:
        dtype: Its name in `STORAGE`.
        shape: Its shape.
        data: A plain strided tensor on any device, with elements of that size; None when only shape and dtype are kept.
        converted_from: What it was, if it was not plain.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Tensor | None
    converted_from: str | None = None

    @property
    def storage(self) -> Storage:
        """How its dtype lies in a safetensors file."""
        return STORAGE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return 0 if self.data is None else math.prod(self.shape) * self.storage.itemsize


def stored(tensor: Tensor) -> Stored:
    """The form in which a tensor is stored. Nothing is copied but what is not plain.

    Raises:
        ArgumentError: Its dtype has no form in a recording.
    """
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if type(tensor) is Tensor:
        return _plain(tensor) if tensor.layout is torch.strided and not tensor.is_nested else _densified(tensor)
    return _from_subclass(tensor)


def _plain(tensor: Tensor, origin: str | None = None) -> Stored:
    if tensor.is_quantized:
        return _plain(tensor.dequantize(), _name(tensor.dtype))
    dtype, shape = _dtype(tensor), tuple(tensor.shape)
    if not has_memory(tensor):
        return Stored(dtype, shape, None, origin)
    # torch cannot copy all of its dtypes, but the whole numbers of the same size
    same_size = _WHOLE.get(STORAGE[dtype].code)
    return Stored(dtype, shape, tensor if same_size is None else tensor.view(same_size), origin)


def _dtype(tensor: Tensor) -> str:
    name = _name(tensor.dtype)
    if name not in STORAGE:
        raise ArgumentError(f"a tensor of dtype {name} cannot be stored. Cast it before it is kept, or leave it out.")
    return name


def _densified(tensor: Tensor) -> Stored:
    origin = "nested" if tensor.is_nested else _name(tensor.layout).removeprefix("_")
    try:
        if not tensor.is_nested and tensor.numel() * tensor.element_size() <= DENSE_LIMIT:
            return _plain(tensor.to_dense(), origin)
    except (RuntimeError, NotImplementedError):
        pass  # there is no dense form of this layout and dtype
    return _shape_only(tensor, origin)


def _from_subclass(tensor: Tensor) -> Stored:
    origin = type(tensor).__name__
    try:
        if tensor.is_nested:
            return _densified(tensor)
        for plain in ("to_local", "wait"):  # DTensor; the result of a collective that may still be on its way
            if hasattr(tensor, plain):
                return stored(getattr(tensor, plain)())._replace(converted_from=origin)
        if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided:
            # a subclass of Python only: copying into a plain tensor is the public way to its values
            return _plain(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor), origin)
    except Exception:
        pass  # what somebody's subclass raises, or why, cannot be known
    return _shape_only(tensor, origin)


def _shape_only(tensor: Tensor, origin: str) -> Stored:
    return Stored(_dtype(tensor), _shape(tensor), None, origin)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Its shape; that of the smallest box around the parts of a nested one."""
    if not tensor.is_nested:
        return tuple(int(size) for size in tensor.shape)
    parts = [part.shape for part in tensor.unbind()]
    return (len(parts), *(max(sizes) for sizes in zip(*parts, strict=True)))


@functools.cache
def _name(thing: torch.dtype | torch.layout) -> str:
    return str(thing).removeprefix("torch.")


class Sink(Protocol):
    """An unbuffered file as `Stage` needs it."""

    def write(self, data: memoryview, /) -> int:
        """Write some bytes, perhaps not all of them; returns how many."""
        ...


class Stage:
    """Gathers the bytes of tensors on the CPU and writes them to a file in large pieces.

    Copying through it reads a copy-on-write snapshot without making it real, which handing out its pointer would do.

    Args:
        file: An unbuffered file, open for writing.
        size: Bytes that will be written in all.
        pinned: Whether to gather in memory from which a CUDA device copies without a stop.
    """

    def __init__(self, file: Sink, size: int, *, pinned: bool = False) -> None:
        self._file = file
        self._size = min(size, _PINNED if pinned else _STAGE)
        self._bytes = torch.empty(self._size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._used = 0
        self._small: list[Tensor] = []  # of one dtype, at the end of what is used, and not copied yet

    def add(self, tensor: Tensor) -> None:
        """Append the elements of a tensor without gradient, in row-major order."""
        plain = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
        size = plain.numel() * plain.itemsize
        if plain.is_cpu and size <= min(_SMALL, self._size - self._used) and not self._used % plain.itemsize:
            if self._small and self._small[0].dtype != plain.dtype:
                self._gather()
            self._small.append(plain.flatten())
            self._used += size
        else:
            self._gather()
            self._add_large(plain.contiguous())

    def _add_large(self, plain: Tensor) -> None:
        # with one element or none, any stride counts as contiguous
        data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        size, done = data.shape[0], 0
        while done < size:
            count = min(size - done, self._size - self._used)
            self._bytes[self._used : self._used + count].copy_(data[done : done + count])
            self._used, done = self._used + count, done + count
            if self._used == self._size:
                self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        self._gather()
        write_all(self._file, self._bytes.numpy()[: self._used].data)
        self._used = 0

    def _gather(self) -> None:
        if self._small:
            dtype = self._small[0].dtype
            size = sum(data.shape[0] for data in self._small) * dtype.itemsize
            torch.cat(self._small, out=self._bytes[self._used - size : self._used].view(dtype))
            self._small = []


def write_all(file: Sink, data: bytes | memoryview) -> None:
    """Write to an unbuffered file, which may take a part only."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
