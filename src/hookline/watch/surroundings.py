"""Random numbers, automatic casts and settings as a module finds them: taken down, set, put back."""

from __future__ import annotations

import contextlib
import platform
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Autocast", "RandomState", "as_it_was", "autocast_state", "environment", "fault_of", "random_state",
    "same_random_numbers", "under",
]  # fmt: skip

RandomState = Mapping[str, Tensor]
"""State of torch's generators by device, such as ``"cpu"`` and ``"cuda:0"``; uint8."""


class Autocast(NamedTuple):
    """What ``torch.autocast`` has set for one type of device; ``dtype`` is that to which it casts."""

    device: str
    enabled: bool
    dtype: torch.dtype


def autocast_state() -> tuple[Autocast, ...]:
    """The automatic casts of this thread."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple(Autocast(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in devices)


@contextlib.contextmanager
def under(state: tuple[Autocast, ...]) -> Iterator[None]:
    """Inside, casts are as given. Nothing is kept in torch's cache of cast weights."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in state:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


def random_state() -> dict[str, Tensor]:
    """The state of torch's generators."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state |= {f"cuda:{n}": one for n, one in enumerate(torch.cuda.get_rng_state_all())}
    return state


@contextlib.contextmanager
def same_random_numbers(rng: Tensor | RandomState | None) -> Iterator[None]:
    """Inside, torch's generators begin at ``rng``, that of the CPU or those by device; all are put back at the end."""
    before, python, numpy = random_state(), random.getstate(), np.random.get_state()
    try:
        if rng is not None:
            _set({"cpu": rng} if isinstance(rng, Tensor) else rng)
        yield
    finally:
        _set(before)
        random.setstate(python)
        np.random.set_state(numpy)


def _set(state: RandomState) -> None:
    for device, one in state.items():
        if device == "cpu":
            torch.set_rng_state(one)
        elif torch.cuda.is_available() and int(device.partition(":")[2]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(one, device)


def environment() -> dict[str, Any]:
    """Releases, machine and settings, for JSON."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def fault_of(then: Mapping[str, Any]) -> str:
    """What is wrong with an environment that was read from a file; empty if nothing is."""
    for name, kind in (("threads", int), ("deterministic", bool), ("warn_only", bool), ("matmul_precision", str)):
        if type(then.get(name)) is not kind:
            return f'"{name}" of the environment is missing or of another type'
    known = isinstance(getattr(torch, str(then.get("default_dtype")), None), torch.dtype)
    return "" if known else '"default_dtype" of the environment is no dtype'


@contextlib.contextmanager
def as_it_was(then: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the settings are those of ``environment()`` then."""
    before = environment()
    _set_settings(then)
    try:
        yield
    finally:
        _set_settings(before)


def _set_settings(then: Mapping[str, Any]) -> None:
    torch.set_num_threads(then["threads"])
    torch.use_deterministic_algorithms(then["deterministic"], warn_only=then["warn_only"])
    torch.set_default_dtype(getattr(torch, then["default_dtype"]))
    torch.set_float32_matmul_precision(then["matmul_precision"])
