"""Names of tensors in a file: ``STEP/SITE/CALL/VALUEPATH``. No torch in here."""

from __future__ import annotations

from typing import Protocol


class _Placed(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def port(self) -> str: ...
    @property
    def call(self) -> int: ...
    @property
    def backward(self) -> int: ...


def prefix_of(event: _Placed) -> str:
    """How the names of all tensors of an event begin: ``3/encoder.0:grad_output/0.b1/``."""
    call = f"{event.call}.b{event.backward}" if event.backward else f"{event.call}"
    return f"{event.step}/{site_name(event.path, event.port)}/{call}/"


def site_name(path: str, port: str) -> str:
    """A site as it is written, of any path and port: a damaged file may have others than a model has."""
    return f"{path or '(root)'}:{port}"


def unique(name: str, names: set[str]) -> str:
    """A name that is not taken; it is added to those taken. What UTF-8 cannot hold is written as an escape."""
    name = found = name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()
    number = 1
    while found in names:
        number += 1
        found = f"{name}~{number}"
    names.add(found)
    return found
