"""The shop window: what ``import hookline`` offers, and that it changes nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hookline

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

IMPORT_AND_COMPARE = '''
"""Import hookline between two looks at what torch, logging and Python hold for everybody; print what differs."""

import builtins, collections.abc, logging, os, signal, sys, threading, warnings
import numpy, rich.console, rich.table, safetensors, torch
import torch.nn.modules.module as module


def attributes(thing):
    return {name: id(value) for name, value in vars(thing).items()}


def look():
    classes = [torch.nn.Module, torch.Tensor, torch.nn.Parameter, torch.autograd.Function, torch.optim.Optimizer]
    state = {f"attributes of {cls.__name__}": attributes(cls) for cls in classes}
    state["functions of torch.nn.functional"] = attributes(torch.nn.functional)
    state["builtins"] = attributes(builtins)
    tables = {name: table for name, table in vars(module).items() if name.startswith("_global_")}
    state["global hook tables"] = {name: dict(table) for name, table in tables.items() if hasattr(table, "items")}
    state["dispatch modes"] = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    state["torch settings"] = (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads(), torch.initial_seed(),
    )
    state["random state"] = torch.get_rng_state().tolist()
    state["warnings"] = list(warnings.filters), warnings.showwarning
    state["logging"] = list(logging.root.handlers), logging.root.level, logging.root.manager.disable, logging.lastResort
    state["hooks of sys"] = sys.excepthook, sys.displayhook, sys.unraisablehook, sys.gettrace(), sys.getprofile()
    state["imports"] = list(sys.meta_path), list(sys.path_hooks), list(sys.path)
    state["threads"] = threading.excepthook, threading.active_count()
    state["signals"] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    state["process"] = os.getcwd(), dict(os.environ), list(sys.argv), sys.getrecursionlimit()
    state["streams"] = id(sys.stdin), id(sys.stdout), id(sys.stderr)
    return state


before = look()
import hookline

after = look()
print("changed:", [name for name in before if before[name] != after[name]])
print("imported:", sorted({"matplotlib", "transformers", "IPython"} & set(sys.modules)))
'''


def test_all_names_what_is_public() -> None:
    public = {name for name, value in vars(hookline).items() if not name.startswith("_") and not _is_incidental(value)}
    assert set(hookline.__all__) - _rooms() == public


def test_all_is_sorted_and_can_be_had() -> None:
    assert list(hookline.__all__) == sorted(hookline.__all__)
    assert all(getattr(hookline, name) is not None for name in hookline.__all__)


def _documented() -> list[str]:
    """What needs an entry: each public name, and in the place of a public room its own names."""
    public = {name: getattr(hookline, name) for name in hookline.__all__}
    return [
        inner
        for name, value in public.items()
        for inner in (value.__all__ if isinstance(value, ModuleType) else [name])
    ]


@pytest.mark.parametrize("name", _documented())
def test_a_public_name_is_in_the_reference(name: str) -> None:
    pages = "\n".join(page.read_text("utf-8") for page in sorted(REFERENCE.glob("*.md")))
    found = re.search(rf"^::: hookline(\.\w+)*\.{name}$", pages, re.MULTILINE)
    assert found, f"no page under docs/reference has a line '::: hookline.{name}'"


def test_import_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_AND_COMPARE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["changed: []", "imported: []"]


def _is_incidental(value: object) -> bool:
    """A room, or ``annotations`` of the __future__ import."""
    return isinstance(value, ModuleType) or type(value).__module__ == "__future__"


def _rooms() -> set[str]:
    return {name for name in hookline.__all__ if isinstance(getattr(hookline, name), ModuleType)}


def test_the_command_that_brings_an_extra_names_its_packages() -> None:
    from importlib.metadata import requires

    from hookline.extras import pip_line

    wanted = [line.partition(";")[0].strip() for line in requires("hookline") or () if "extra == " in line]
    for name in ("plot", "parquet", "pandas", "polars", "s3"):
        packages = re.findall(r'"([^"]+)"', pip_line(name))
        assert packages and set(packages) <= set(wanted), name
    assert "s3fs" in pip_line("s3") and "fsspec" in pip_line("s3")
