"""The program that is run: where its code comes from, and the world in which it runs."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from hookline.errors import OptionError

__all__ = ["Module", "NotFound", "Program", "Script", "world"]


class NotFound(OptionError):
    """There is no such program, or none that can be run."""


class Program:
    """What runs as ``__main__``.

    Attributes:
        name: What it is called in the recording.
        argv: What ``sys.argv`` is when the search for its code begins.
        folder: What comes first in ``sys.path``.
    """

    name: str
    argv: list[str]
    folder: str

    def load(self) -> tuple[CodeType, dict[str, Any]]:
        """Its code, and the names that ``__main__`` has before it runs.

        Raises:
            NotFound: There is no such program.
            Exception: What the program itself raises, such as SyntaxError.
        """
        raise NotImplementedError

    def execute(self) -> None:
        """Run it as ``sys.modules["__main__"]``."""
        code, names = self.load()
        main = sys.modules["__main__"]
        vars(main).update(names)
        exec(code, vars(main))


class Script(Program):
    """A file, as in ``python script.py args...``.

    Raises:
        NotFound: There is no such file, or it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], args: Sequence[str] = ()) -> None:
        given = os.fspath(path)
        if os.path.isdir(given):
            raise NotFound(f"{given} is a folder: name a script in it, or a module with -m.")
        try:
            with io.open_code(os.path.abspath(given)) as file:
                self._source = file.read()
        except OSError as error:
            raise NotFound(
                f"the script {given} cannot be read ({error.strerror}). Working folder: {os.getcwd()}"
            ) from error
        # Python joins and does not normalize: __file__ of ./train.py is /home/me/./train.py.
        self._file = os.path.join(os.getcwd(), given)
        self.name = given
        self.argv = [given, *args]
        self.folder = os.path.dirname(os.path.realpath(given))

    def load(self) -> tuple[CodeType, dict[str, Any]]:
        """Compile the file."""
        code = compile(self._source, self._file, "exec", dont_inherit=True)
        loader = SourceFileLoader("__main__", self._file)
        return code, {"__file__": self._file, "__loader__": loader, "__cached__": None}


class Module(Program):
    """A module, or a package that has a ``__main__``, as in ``python -m package.module args...``."""

    def __init__(self, name: str, args: Sequence[str] = ()) -> None:
        self.name = f"-m {name}"
        self._module = name
        self.argv = ["-m", *args]
        self.folder = os.getcwd()

    def load(self) -> tuple[CodeType, dict[str, Any]]:
        """Find the module, which runs the packages above it."""
        spec = _find(self._module)
        if spec.submodule_search_locations is not None:
            spec = _find(f"{self._module}.__main__")
        code = spec.loader.get_code(spec.name) if isinstance(spec.loader, InspectLoader) else None
        if code is None:
            raise NotFound(f"the module {spec.name} has no Python code that can be run.")
        sys.argv[0] = str(spec.origin)
        names = {"__file__": spec.origin, "__loader__": spec.loader, "__cached__": spec.cached}
        return code, {**names, "__spec__": spec, "__package__": spec.parent}


def _find(name: str) -> ModuleSpec:
    """The spec of a module; imports the packages above it, whose errors are the program's own."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        # A package that fails to import something else is not missing.
        if isinstance(error, ImportError) and error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise
        raise NotFound(f"there is no module {name} ({error}).") from error
    if spec is None:
        package, _, last = name.rpartition(".")
        what = (
            f"the package {package} cannot be run: it has no __main__"
            if last == "__main__"
            else f"there is no module {name}"
        )
        raise NotFound(f"{what}. Modules are looked for in the working folder, {os.getcwd()}, and in sys.path.")
    return spec


@contextlib.contextmanager
def world(program: Program, *, stays: bool = False) -> Iterator[None]:
    """What a program finds around it when it is started by Python itself.

    Args:
        program: What is going to run.
        stays: Whether this process is there for the program alone: what Python has put first in ``sys.path`` for our
            own command is left out, and nothing is put back.
    """
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = program.argv.copy()
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[: 1 if stays else 0] = [program.folder]
    sys.modules["__main__"] = _main_module()
    try:
        yield
    finally:
        if not stays:
            sys.argv, sys.path[:], sys.modules["__main__"] = before


def _main_module() -> ModuleType:
    main = ModuleType("__main__")
    names: dict[str, Any] = {"__builtins__": builtins, "__spec__": None, "__package__": None}
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    vars(main).update(names)
    return main
