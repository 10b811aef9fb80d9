"""Each room keeps to its own business: torch's hooks, classes and private names belong to ``hookline.hooks`` alone.

import-linter holds the directions between the rooms (``[tool.importlinter]`` in pyproject.toml). This holds what it
cannot see: attributes, and the private parts of torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[1] / "src" / "hookline"

ALLOWED = {
    # Torch's register of containers, which users add their own classes to; it has no public name in torch 2.6 to 2.13.
    ("containers.py", "torch.utils._pytree"),
}
"""(file, what it uses) that is let through; each with its reason."""

PRIVATE_OF_TORCH = {
    name
    for thing in (torch.nn.Module(), torch.nn.Parameter(torch.zeros(1)))
    for name in dir(thing)
    if name.startswith("_") and not name.endswith("__")
}
"""Underscore names of tensors and modules: ``_lazy_clone``, ``_version``, ``_forward_hooks``, ..."""

FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
OUTSIDE_HOOKS = [name for name in FILES if not name.startswith("hooks/")]
BELOW_THE_WINDOW = [name for name in FILES if name != "__init__.py" and not name.startswith("cli/")]


@pytest.mark.parametrize("name", OUTSIDE_HOOKS)
def test_only_the_hooks_room_touches_the_inside_of_torch(name: str) -> None:
    code = FILES[name].read_text("utf-8")
    found = [(line, what) for line, what in inside_of_torch(code) if (name, what) not in ALLOWED]
    assert not found, f"{name} uses (line, what): {found}; put it into hookline.hooks behind a function that says why"


@pytest.mark.parametrize("name", BELOW_THE_WINDOW)
def test_no_room_imports_the_shop_window(name: str) -> None:
    found = [line for line, module in _imports(ast.parse(FILES[name].read_text("utf-8"))) if _is_window(module)]
    assert not found, f"{name} imports from the package's __init__ on lines {found}; import from the room itself"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import torch._C", "torch._C"),
        ("from torch._C import _len_torch_dispatch_stack", "torch._C"),
        ("from torch.utils import _python_dispatch", "torch.utils._python_dispatch"),
        ("import torch\ntorch._C._current_graph_task_id()", "torch._C"),
        ("import torch as t\nt.nn.Module._version", "torch.nn.Module._version"),
        ("import torch\nclass F(torch.autograd.Function): ...", "torch.autograd.Function"),
        ("from torch.autograd import Function", "torch.autograd.Function"),
        ("tensor._lazy_clone()", "._lazy_clone"),
        ("module._forward_hooks.clear()", "._forward_hooks"),
        ("module.register_forward_hook(hook)", ".register_forward_hook"),
        ("tensor.register_hook(hook)", ".register_hook"),
        ("tensor.grad_fn.register_prehook(hook)", ".register_prehook"),
        ("module.__class__ = Other", ".__class__ ="),
    ],
)
def test_the_scan_sees(code: str, what: str) -> None:
    assert what in [found for _, found in inside_of_torch(code)]


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nfrom torch import Tensor\ntorch.nn.Module().named_modules()",
        "from hookline import hooks\nhooks.register_forward_hook(module, hook)",
        "from hookline.hooks import register_forward_hook\nregister_forward_hook(module, hook)",
        "class Own:\n    def __init__(self):\n        self._modules = {}",
        "print(thing.__class__.__name__)",
    ],
)
def test_the_scan_lets_through(code: str) -> None:
    assert list(inside_of_torch(code)) == []


def inside_of_torch(code: str) -> Iterator[tuple[int, str]]:
    """Line and name of each use of torch's private names, autograd functions, hook methods and class swaps."""
    tree = ast.parse(code)
    for line, module in _imports(tree):
        if private := _private_part(module):
            yield line, private
    known = _bindings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from ((node.lineno, what) for what in _uses(node, known))


def _uses(node: ast.Attribute, known: dict[str, str]) -> Iterator[str]:
    dotted = _dotted(node, known)
    if private := _private_part(dotted):
        yield private
        return
    if dotted.startswith(("hookline.", "self.", "cls.")):
        return
    if node.attr in PRIVATE_OF_TORCH or (node.attr.startswith("register_") and node.attr.endswith("hook")):
        yield f".{node.attr}"
    if node.attr == "__class__" and isinstance(node.ctx, ast.Store):
        yield ".__class__ ="


def _private_part(dotted: str) -> str | None:
    """``torch._C`` for ``torch._C._autograd``; None for what torch offers to everybody."""
    if dotted == "torch.autograd.Function":
        return dotted
    found = re.match(r"torch(\.\w+)*?\._(?!\w*__\b)\w*", dotted)
    return found[0] if found else None


def _is_window(module: str) -> bool:
    """``hookline`` itself, or a name in it that is no room."""
    first, _, rest = module.partition(".")
    room = SOURCE / rest.split(".")[0]
    return first == "hookline" and not (rest and (room.is_dir() or room.with_suffix(".py").is_file()))


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, the imported name included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _bindings(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for: ``{"t": "torch", "nn": "torch.nn"}``."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound.update({alias.asname or alias.name.split(".")[0]: _bound_to(alias) for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return bound


def _bound_to(alias: ast.alias) -> str:
    return alias.name if alias.asname else alias.name.split(".")[0]


def _dotted(node: ast.expr, known: dict[str, str]) -> str:
    """``t.nn.Module`` as ``torch.nn.Module``; an expression that is no chain of names as ``?``."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, known)}.{node.attr}"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else "?"
