"""Copies of values beside what a device computes next: marks of its streams, and streams behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["marks", "on_device"]


def marks(event: Any) -> Any:
    """Where the streams of the devices of its tensors stand; None for those of the CPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    devices = {leaf.device for _, leaf in event.leaves() if leaf.device.type == "cuda"}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices} if devices else None


@contextlib.contextmanager
def on_device(several: Iterable[Any]) -> Iterator[None]:
    """Copy on streams of our own, behind what computes the values and beside what comes after."""
    found = [mark for mark in several if mark is not None]
    with contextlib.ExitStack() as stack:
        for device in {device for mark in found for device in mark}:
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for mark in found:
                if device in mark:
                    stream.wait_event(mark[device])
            stack.enter_context(torch.cuda.stream(stream))
        yield
