"""What holds for every test: one thread, a seed, and a guard that nothing global is left behind."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules import module as torch_module

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

_CALL_PATH = ("__call__", "_call_impl", "__getattr__", "__setattr__", "__delattr__", "forward")
"""What torch.nn.Module does on a call and on an attribute; torch's compiler adds other names to the class for good."""


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed, run the test, then compare what torch and Python hold for everybody with how it was."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before, threads, rng = _global_state(), set(threading.enumerate()), torch.get_rng_state()
    yield
    after, hooks = _global_state(), _take_global_hooks()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not hooks, f"the test left hooks in torch's global tables: {hooks}"
    assert not changed, f"the test left these changed (before, after): {changed}"
    assert not (left := _new_threads(threads)), f"the test left threads running: {left}"
    if request.node.get_closest_marker("same_rng"):
        assert torch.equal(rng, torch.get_rng_state()), "the test moved torch's random state"


def _global_state() -> dict[str, Any]:
    return {
        "nn.Module's methods": {name: vars(torch.nn.Module)[name] for name in _CALL_PATH},
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "fused attention": torch.backends.mha.get_fastpath_enabled(),
        "threads of torch": torch.get_num_threads(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "working directory": os.getcwd(),
        "sys.argv": list(sys.argv),
        # torch's compiler imports setuptools, which appends a folder of its own.
        "sys.path": [entry for entry in sys.path if not entry.endswith("_vendor")],
        "sys.modules['__main__']": id(sys.modules["__main__"]),
        "sys.excepthook": sys.excepthook,
        "sys.stdout": id(sys.stdout),
    }


def _take_global_hooks() -> dict[str, list[Any]]:
    """What torch holds for all modules; taken out, so that the test at fault is the only one that fails."""
    tables = {name: table for name, table in vars(torch_module).items() if name.startswith("_global_")}
    found = {name: list(table.values()) for name, table in tables.items() if isinstance(table, dict) and table}
    for name in found:
        tables[name].clear()
    return found


def _new_threads(known: set[threading.Thread], patience: float = 1.0) -> list[threading.Thread]:
    """Python threads that the test started and that do not end within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while left := [thread for thread in threading.enumerate() if thread not in known and not _is_foreign(thread)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return left


def _is_foreign(thread: threading.Thread) -> bool:
    """Started by C code, such as autograd's device threads, or of fsspec, which keeps its own; both go on for ever."""
    return isinstance(thread, threading._DummyThread) or thread.name == "fsspecIO" or thread.name.startswith("asyncio_")
