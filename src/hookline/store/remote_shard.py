"""Shards on an object store: a request for each tensor, and the last ones kept in memory."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.store import header
from hookline.store.format import ShardLine, TensorLine
from hookline.store.remote import Place, Remote
from hookline.store.shard import Shard, torch_dtype, write_into
from hookline.store.strict_json import DAMAGED, fault
from hookline.store.tensors import Stored

_KEPT = 64 << 20
"""Bytes of tensors that a process keeps, since rows of one value are often read one by one."""
_HEADER = 64 << 10
"""Bytes of the first request to a shard: the header of most."""


class _Recent:
    """Bytes of the tensors that were read last."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, int], bytearray] = OrderedDict()
        self._used = 0
        self._one_at_a_time = threading.Lock()

    def read(self, place: Remote, begin: int, end: int, *, of_any_size: bool = False) -> bytearray:
        """Some bytes of an object, not to be written; of a large tensor they are kept only ``of_any_size``."""
        key = place.url, begin
        with self._one_at_a_time:
            if key in self._found and len(self._found[key]) == end - begin:
                self._found.move_to_end(key)
                return self._found[key]
        data = bytearray(place.read(begin, end))
        with self._one_at_a_time:
            if (of_any_size or len(data) <= _KEPT // 4) and key not in self._found:
                self._found[key] = data
                self._used += len(data)
            while self._used > _KEPT and len(self._found) > 1:
                self._used -= len(self._found.popitem(last=False)[1])
        return data

    def forget(self) -> None:
        """Read everything anew from now on."""
        with self._one_at_a_time:
            self._found.clear()
            self._used = 0

    def renew_lock(self) -> None:
        """In a forked process: a thread that held it is not there."""
        self._one_at_a_time = threading.Lock()


recent = _Recent()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=recent.renew_lock)


class RemoteShard(Shard):
    """A shard on an object store. Its header is read when its first tensor is asked for.

    Args:
        path: The object.
        size: Bytes that it has to have.
        found: Bytes that it has; None when there is no such object.

    Raises:
        FormatError: It is missing or of another size.
    """

    path: Remote

    def __init__(self, path: Remote, size: int, found: int | None) -> None:
        self.path, self.size = path, size
        if found is None:
            raise fault(path, "this part of the recording is missing", "Copy the whole recording again.")
        if found != size:
            advice = f"It is truncated. {DAMAGED}" if found < size else DAMAGED
            raise fault(path, f"it has {found} bytes, its manifest says {size}", advice)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which asks the store itself."""
        return {"path": self.path, "size": self.size}

    def tensor(self, line: TensorLine) -> Tensor:
        """The tensor of a manifest line: memory of its own.

        Raises:
            FormatError: The object is damaged or hostile, does not hold that tensor, or cannot be reached.
        """
        return self._tensor(line, shared=False)

    def shared(self, line: TensorLine) -> Tensor:
        """The tensor of a manifest line, not to be written: its bytes are kept for whoever asks for it next.

        Raises:
            FormatError: As for `tensor`.
        """
        return self._tensor(line, shared=True)

    def _tensor(self, line: TensorLine, *, shared: bool) -> Tensor:
        dtype, (begin, end) = torch_dtype(line.dtype, self.path), self._place(line)
        if begin == end:
            return torch.frombuffer(bytearray(dtype.itemsize), dtype=dtype)[:0].view(line.shape)
        found = recent.read(self.path, begin, end, of_any_size=shared)
        return torch.frombuffer(found if shared else bytearray(found), dtype=dtype).view(line.shape)

    def span(self, line: TensorLine) -> None:
        """Nothing: it is not in memory."""

    @cached_property
    def contents(self) -> header.Header:
        """What the object says it holds.

        Raises:
            FormatError: The header is damaged or hostile, or cannot be reached.
        """
        with self.path.open(buffer=_HEADER, size=self.size) as file:
            return header.read(file, self.size, self.path)


class Shards:
    """Opens the shards of a folder. An object store is asked once for all of them, and again for newer ones."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}

    def open(self, name: str, size: int) -> Shard:
        """The shard of that name.

        Raises:
            FormatError: It is missing, not a plain file, or of another size.
        """
        if isinstance(self._folder, Path):
            return Shard(self._folder / name, size)
        if name not in self._sizes:
            self._sizes = self._folder.children()
        return RemoteShard(self._folder / name, size, self._sizes.get(name))


def put_shard(path: Remote, tensors: Iterable[tuple[str, Stored]]) -> tuple[ShardLine, Shard]:
    """Put named tensors as a safetensors file, which is made in memory.

    Returns:
        Its entry in the manifest, and the shard.

    Raises:
        FormatError: The store refuses or cannot be reached, or there are too many names for one file.
    """
    made = io.BytesIO()
    entry = write_into(made, tensors, path)
    path.put(made.getvalue())
    return entry, RemoteShard(path, entry.nbytes, entry.nbytes)
