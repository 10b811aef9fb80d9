"""The source files in which a model's classes are written: what a bundle copies, and how classes are made of it again.

Of a copied file only imports, definitions of classes and functions, and assignments of constants are executed. So a
training script gives its classes and does not train.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hookline.watch.codec import CannotStore

__all__ = ["Sources", "import_name", "local_sources"]

_HARMLESS = frozenset({
    "TypeVar", "ParamSpec", "NewType", "namedtuple", "NamedTuple", "getLogger", "device", "finfo", "set", "frozenset",
    "tuple", "list", "dict", "range", "int", "float", "bool", "str", "len",
})  # fmt: skip
"""Functions that a constant may be made with."""
_PLAIN = (
    ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp, ast.BoolOp,
    ast.Compare, ast.Subscript, ast.Slice, ast.keyword, ast.expr_context, ast.operator, ast.unaryop, ast.boolop,
    ast.cmpop, ast.Starred, ast.JoinedStr, ast.FormattedValue, ast.Lambda, ast.arguments, ast.arg,
)  # fmt: skip


def import_name(thing: Any) -> str:
    """Where a class or function can be imported from, ``"package.module:Class.method"``.

    Raises:
        CannotStore: It has no such name: a lambda, or made inside a function.
    """
    name, qualified = getattr(thing, "__name__", ""), getattr(thing, "__qualname__", "")
    places = [(getattr(thing, "__module__", None), qualified), ("torch", name), ("torch.nn.functional", name)]
    for module, path in places:
        if module in sys.modules and _walk(sys.modules[module], path) is thing:
            return f"{module}:{path}"
    kind = "the class" if isinstance(thing, type) else "the function"
    raise CannotStore(f"{kind} {qualified or name or 'without a name'} cannot be imported by name")


def _walk(thing: Any, path: str) -> Any:
    for part in path.split("."):
        thing = getattr(thing, part, None)
    return thing


# ---------------------------------------------------------------- what to copy


def local_sources(names: Iterable[str]) -> dict[str, Path]:
    """The source files of modules that no package brings, with those that they import, by the name of the module."""
    found: dict[str, Path] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        file = None if name in found else _local_file(name)
        if file is not None:
            found[name] = file
            waiting += _imported(name, file)
            waiting += [parent for parent in [name.rpartition(".")[0]] if parent]
    return found


def _local_file(name: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file or not str(file).endswith(".py"):
        return None
    path = Path(file).resolve()
    return path if path.is_file() and not any(path.is_relative_to(folder) for folder in _installed()) else None


def _installed() -> list[Path]:
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")] + site.getsitepackages()
    own = Path(__file__).resolve().parents[1]
    torch = Path(str(sys.modules["torch"].__file__)).resolve().parent
    return [own, torch, *(Path(folder).resolve() for folder in (*folders, site.getusersitepackages()))]


def _imported(name: str, file: Path) -> Iterator[str]:
    """Names of the modules that a file may import."""
    module = sys.modules[name]
    package = getattr(module, "__package__", None) or ""
    with contextlib.suppress(SyntaxError, ValueError, OSError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                start = node.module or ""
                if node.level:
                    start = importlib.util.resolve_name("." * node.level + start, package)
                yield start
                yield from (f"{start}.{alias.name}" for alias in node.names)


# ---------------------------------------------------------------- what is executed


def definitions(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that define something, of those that a file begins with or has at its top level."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or (
            isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_constant(node.value)
        ):
            yield node
        elif isinstance(node, ast.Try):
            yield from _definitions_of_try(node)
        elif isinstance(node, ast.If) and _is_constant(node.test) and "__name__" not in _names(node.test):
            node.body, node.orelse = [*definitions(node.body)], [*definitions(node.orelse)]
            if node.body or node.orelse:
                node.body = node.body or [ast.copy_location(ast.Pass(), node)]
                yield node


def _definitions_of_try(node: ast.Try) -> Iterator[ast.stmt]:
    """As it is when it only defines, such as an import with a substitute."""
    parts = [node.body, node.orelse, node.finalbody, *(handler.body for handler in node.handlers)]
    if all(isinstance(one, ast.Pass) or len([*definitions([one])]) == 1 for part in parts for one in part):
        yield node


def _is_constant(value: ast.expr | None) -> bool:
    if value is None:
        return True
    return all(isinstance(part, _PLAIN) or (isinstance(part, ast.Call) and _called(part)) for part in ast.walk(value))


def _called(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _HARMLESS


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


class Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Copied source files as modules; with it entered, imports find them before all others.

    Args:
        folder: Where they lie.
        files: By the name of each module, its file in that folder.

    Attributes:
        problems: What could not be executed, and why.
    """

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self._folder, self._files = folder, files
        self._hidden: dict[str, ModuleType] = {}
        self.problems: list[str] = []

    def __enter__(self) -> Sources:
        self._hidden = {name: sys.modules.pop(name) for name in self._files if name in sys.modules}
        sys.meta_path.insert(0, self)
        sys.path.insert(0, str(self._folder))  # for packages without an __init__.py
        if "__main__" in self._files:
            importlib.import_module("__main__")
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)
        sys.path.remove(str(self._folder))
        for name in self._files:
            sys.modules.pop(name, None)
        sys.modules.update(self._hidden)

    def find(self, name: str) -> Any:
        """What an import name stands for.

        Raises:
            LookupError: There is no such thing.
        """
        module, _, path = name.partition(":")
        try:
            found = _walk(importlib.import_module(module), path)
        except ImportError as error:
            raise LookupError(f"{name} cannot be imported: {error}") from error
        if found is None:
            why = "; ".join(self.problems[:3])
            raise LookupError(f"{name} is not defined there" + (f"; what could not be executed: {why}" if why else ""))
        return found

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Called by Python's import."""
        if fullname not in self._files:
            return None
        file = self._folder / self._files[fullname]
        package = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=self, submodule_search_locations=package
        )  # fmt: skip

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Called by Python's import."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the definitions one by one; what fails is remembered."""
        file = str(module.__file__)
        tree = ast.parse(Path(file).read_bytes(), file)
        future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        flags = 0
        for name in (alias.name for node in future for alias in node.names):
            flags |= getattr(__future__, name).compiler_flag
        for node in definitions(tree.body):
            try:
                code = compile(ast.Module([node], []), file, "exec", flags=flags, dont_inherit=True)
                exec(code, vars(module))
            except Exception as error:
                self.problems.append(f"{Path(file).name}:{node.lineno}: {type(error).__name__}: {error}")
