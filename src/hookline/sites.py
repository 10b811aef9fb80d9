"""Places in a model: paths, ports, sites, and the patterns that name many of them at once.

====================  ============================================================================================
pattern               names
====================  ============================================================================================
``layer1.0.conv1``    that module; ``""`` and ``(root)`` are the model itself
``layer?.*.conv[12]`` a glob: ``*``, ``?``, ``[ab]``, ``[a-c]`` and ``[!a]`` stay inside one level, between two dots
``encoder.**``        ``**`` alone between dots is any number of levels, also none; ``**`` is every module
``re:.*conv[0-9]+``   a regular expression that matches the whole path
``torch.nn.Conv2d``   a module class: its instances
``f(path, module)``   a function: the modules for which it says True
``[a, b, "!c"]``      all of these together without those after a ``!``; only excludes: everything but those
====================  ============================================================================================

A string may end in a port, as in ``layer*:grad_output``. A module that has the very name of a pattern, such as
``!a``, ``re:b`` or ``c*:output``, always wins over the other reading.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from hookline.errors import ArgumentError, OptionError, SiteError
from hookline.globs import translate
from hookline.spelling import kind, name_of, nearest, nearest_clause, quoted

__all__ = [
    "PORTS",
    "ROOT_LABEL",
    "Pattern",
    "Site",
    "canonical_paths",
    "check_ports",
    "label",
    "match_paths",
    "named_exactly",
    "nearest",
    "resolve",
    "resolve_paths",
]

PORTS = ("input", "output", "grad_input", "grad_output")
"""What can be seen of a module call."""

ROOT_LABEL = "(root)"
"""How the path of the model itself, the empty string, is shown."""

Predicate = Callable[[str, nn.Module], bool]
Element = str | type[nn.Module] | Predicate
Pattern = Element | Sequence["Pattern"]
"""What names modules or sites; a sequence is a list or a tuple."""


def label(path: str) -> str:
    """A path as it is shown: ``(root)`` for the empty one."""
    return path or ROOT_LABEL


@dataclass(frozen=True, order=True)
class Site:
    """One port of one module, written ``layer1.0.conv1:output``.

    Attributes:
        path: Qualified name of the module as in ``named_modules()``; empty for the root.
        port: One of ``PORTS``; anything else raises OptionError.
    """

    path: str
    port: str

    def __post_init__(self) -> None:
        if self.port not in PORTS:
            raise OptionError(_wrong_port(self.port))

    def __str__(self) -> str:
        return f"{label(self.path)}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """Read what ``str(site)`` writes; the path may itself contain colons.

        Raises:
            ArgumentError: Not a string.
            SiteError: The text does not end in a colon and a port.
        """
        if not isinstance(text, str):
            raise ArgumentError(f'a site is a string such as "layer1:output"; got {kind(text)}')
        path, port = _split_port(text)
        if port is None:
            problem = _wrong_port(text.rpartition(":")[2]) if ":" in text else "no port"
            raise SiteError(f'"{text}": {problem}; a site is written path:port, as in "layer1:output"')
        return cls("" if path == ROOT_LABEL else path, port)


def check_ports(ports: str | Iterable[str]) -> tuple[str, ...]:
    """One port name or several as a tuple: each once, in the order of ``PORTS``.

    Raises:
        ArgumentError: Neither a string nor an iterable.
        OptionError: A name that is no port, or no name at all.
    """
    if not isinstance(ports, Iterable):
        raise ArgumentError(f"ports: got {kind(ports)}, wanted one or more of {quoted(PORTS)}")
    names = [ports] if isinstance(ports, str) else list(ports)
    if not names:
        raise OptionError(f"ports: got none, wanted one or more of {quoted(PORTS)}")
    for name in names:
        if name not in PORTS:
            raise OptionError(_wrong_port(name))
    return tuple(port for port in PORTS if port in names)


def _split_port(text: str) -> tuple[str, str | None]:
    head, colon, tail = text.rpartition(":")
    return (head, tail) if colon and tail in PORTS else (text, None)


def _wrong_port(port: object) -> str:
    got, near = (f'"{port}"', nearest_clause(port, PORTS, 1)) if isinstance(port, str) else (kind(port), "")
    return f"unknown port: got {got}, wanted one of {quoted(PORTS)}{near}"


# ---------------------------------------------------------------- resolving a pattern


def resolve(model: nn.Module, sites: Pattern, ports: str | Iterable[str] = ("output",)) -> list[Site]:
    """The sites of a model that a pattern names.

    A module that stands in several places is found under each of its paths and named by the first.

    Args:
        model: Whose modules to look at.
        sites: A pattern; the top of this file lists the forms.
        ports: For patterns that name no port of their own.

    Returns:
        At least one site, none twice, in the order of ``named_modules()`` and then of ``PORTS``.

    Raises:
        ArgumentError: The model is no module, or a pattern is of a kind that is not supported.
        OptionError: A name in ``ports`` is no port.
        SiteError: A pattern, also an exclude, names nothing or cannot be read, or nothing is left.
    """
    scope = _scope_of(model)
    chosen = _choose(scope, sites, check_ports(ports))
    return [Site(path, port) for path in scope.order for port in PORTS if path in chosen[port]]


def resolve_paths(model: nn.Module, sites: Pattern) -> list[str]:
    """Paths of the modules that a pattern names; a module is left out when all its ports are.

    Raises:
        ArgumentError: As for ``resolve``.
        SiteError: As for ``resolve``.
    """
    return _paths(_scope_of(model), sites)


def named_exactly(model: nn.Module, sites: Pattern) -> list[str]:
    """First paths of the modules whose very name stands in a pattern.

    Raises:
        ArgumentError: As for ``resolve``.
    """
    scope = _scope_of(model)
    texts = (element for element in _elements(sites, with_model=True) if isinstance(element, str))
    found = (text for element in texts for text in (element, _split_port(element)[0]) if scope.has(text))
    return list(dict.fromkeys(scope.first[text if text in scope.modules else ""] for text in found))


def match_paths(pattern: Pattern, paths: Iterable[str]) -> list[str]:
    """Those of some paths that a pattern names, in their order; for where there is no model at hand.

    Args:
        pattern: A string, or a list or tuple of strings.
        paths: What to choose from; the root is the empty string.

    Raises:
        ArgumentError: The pattern holds a class or a function, which need modules, or something else.
        SiteError: As for ``resolve``.
    """
    known = {path: path for path in paths}
    return _paths(_Scope(known, known, title=""), pattern)


def canonical_paths(model: nn.Module) -> dict[str, str]:
    """Every path of every module, in model order, with the first path of the same module.

    A module that contains itself has no end of paths; a model with one is listed by first paths only.

    Raises:
        ArgumentError: The model is no module.
    """
    return dict(_scope_of(model).first)


class _Rule(NamedTuple):
    """One element of a pattern and what it names; a port of None stands for the ports asked for."""

    shown: str
    excludes: bool
    port: str | None
    paths: Iterable[str]


def _choose(scope: _Scope, pattern: Pattern, ports: Sequence[str]) -> dict[str, set[str]]:
    """First paths of the modules that are chosen, by port."""
    rules = [_read(element, scope) for element in _elements(pattern, with_model=bool(scope.title))]
    excludes = [rule for rule in rules if rule.excludes]
    chosen: dict[str, set[str]] = {port: set() for port in PORTS}
    for rule in [rule for rule in rules if not rule.excludes] or [_Rule("**", False, None, scope.first)]:
        for port in ports if rule.port is None else [rule.port]:
            chosen[port].update(scope.first[path] for path in rule.paths)
    count = sum(map(len, chosen.values()))
    for rule in excludes:
        for port in PORTS if rule.port is None else [rule.port]:
            chosen[port].difference_update(scope.first[path] for path in rule.paths)
    if not any(chosen.values()):
        names = quoted(rule.shown for rule in excludes)
        raise SiteError(f"nothing is left of {count} sites without {names}; leave out an exclude or choose more")
    return chosen


def _paths(scope: _Scope, pattern: Pattern) -> list[str]:
    chosen: set[str] = set().union(*_choose(scope, pattern, PORTS).values())
    return [path for path in scope.order if path in chosen]


def _elements(pattern: Pattern, with_model: bool) -> list[Element]:
    """The strings, classes and functions in a pattern, so that a wrong kind is told before any function is called."""
    if isinstance(pattern, (list, tuple)):
        if not pattern:
            raise SiteError('an empty list names no module; "**" names every module')
        return [element for item in pattern for element in _elements(item, with_model)]
    if isinstance(pattern, str) or (with_model and (_is_module_class(pattern) or _is_predicate(pattern))):
        return [pattern]
    if not with_model:
        raise ArgumentError(f"without a model a pattern is a string or a list of strings; got {kind(pattern)}")
    advice = "; name it by its path or its class" if isinstance(pattern, nn.Module) else ""
    wanted = "a string, a module class, a function (path, module) -> bool, or a list or tuple of these"
    raise ArgumentError(f"a pattern is {wanted}; got {kind(pattern)}{advice}")


def _is_module_class(value: object) -> TypeGuard[type[nn.Module]]:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _is_predicate(value: object) -> TypeGuard[Predicate]:
    """Modules and classes can be called too, but nobody means them to be asked about a path."""
    return callable(value) and not isinstance(value, (type, nn.Module))


# ---------------------------------------------------------------- what there is to name


@dataclass(frozen=True)
class _Scope:
    """All paths with their modules and first paths; ``title`` is the type of the model, empty where there is none."""

    modules: Mapping[str, Any]
    first: Mapping[str, str]
    title: str

    @property
    def order(self) -> Iterable[str]:
        return dict.fromkeys(self.first.values())

    def __str__(self) -> str:
        count = len(set(self.first.values()))
        many = "s" * (count != 1)
        return f"the {count} module{many} of {self.title}" if self.title else f"the {count} path{many}"

    def has(self, text: str) -> bool:
        """Whether a text is the exact name of a module."""
        return text in self.modules or (text == ROOT_LABEL and "" in self.modules)

    def near(self, text: str) -> str:
        return nearest_clause(text, map(label, self.modules))

    def error(self, problem: str) -> SiteError:
        """A SiteError that ends with how to see the names."""
        if self.title:
            return SiteError(f"{problem}. List the names with [n for n, _ in model.named_modules()].")
        some = quoted(label(path) for path in list(self.modules)[:3]) or "none"
        return SiteError(f"{problem}. The paths are {some}{' and others' * (len(self.modules) > 3)}.")


def _scope_of(model: nn.Module) -> _Scope:
    if not isinstance(model, nn.Module):
        advice = "; make an instance of it" if _is_module_class(model) else ""
        raise ArgumentError(f"the model must be a torch.nn.Module; got {kind(model)}{advice}")
    first: dict[int, str] = {}
    modules = _named_modules(model)
    canonical = {path: first.setdefault(id(module), path) for path, module in modules.items()}
    return _Scope(modules, canonical, type(model).__name__)


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """All paths; a module below itself would make them endless, so then only the first path of each."""
    above: list[int] = []
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        del above[path.count(".") + 1 if path else 0 :]
        if id(module) in above:
            return dict(model.named_modules())
        above.append(id(module))
        found[path] = module
    return found


# ---------------------------------------------------------------- one element of a pattern


def _read(element: Element, scope: _Scope) -> _Rule:
    if not isinstance(element, str):
        return _Rule(name_of(element), False, None, _named(element, scope))
    excludes = element.startswith("!") and not (scope.has(element) or scope.has(_split_port(element)[0]))
    wanted = element[1:] if excludes else element
    head, port = _split_port(wanted)
    if scope.has(wanted) or (head == "re" and not scope.has(head)):  # re:output is an expression without a port
        head, port = wanted, None
    return _Rule(element, excludes, port, _named(head, scope))


def _named(wanted: Element, scope: _Scope) -> list[str]:
    if isinstance(wanted, str) and scope.has(wanted):
        return [wanted if wanted in scope.modules else ""]
    accepts = _test_of(wanted)
    found = [path for path, module in scope.modules.items() if accepts(path, module)]
    if not found:
        raise scope.error(_unmatched_text(wanted, scope) if isinstance(wanted, str) else _unmatched(wanted, scope))
    return found


def _test_of(wanted: Element) -> Callable[[str, Any], Any]:
    if isinstance(wanted, type):
        return lambda path, module: isinstance(module, wanted)
    if not isinstance(wanted, str):
        return wanted
    expression = _compile(wanted)
    if wanted.startswith("re:"):
        return lambda path, module: expression.fullmatch(path)
    return lambda path, module: expression.fullmatch(f"{path}." if path else "")


def _unmatched(wanted: type[nn.Module] | Predicate, scope: _Scope) -> str:
    if not isinstance(wanted, type):
        return f"the function {name_of(wanted)} accepts none of {scope}"
    types = (type(module).__name__ for module in scope.modules.values())
    return f"no {wanted.__name__} among {scope}{nearest_clause(wanted.__name__, types)}"


def _unmatched_text(wanted: str, scope: _Scope) -> str:
    head, colon, tail = wanted.removeprefix("re:").rpartition(":")
    if colon and tail.isidentifier() and (scope.has(head) or nearest(tail, PORTS)):
        raise SiteError(f'"{wanted}": {_wrong_port(tail)}')
    if wanted.startswith("re:"):
        part = any(map(_compile(wanted).search, scope.modules))
        hint = "; it must match the whole path: put .* before or after it to match a part" if part else ""
        return f'the pattern "{wanted}" matches none of {scope}{hint}'
    if any(sign in wanted for sign in "*?["):
        return f'the pattern "{wanted}" matches none of {scope}{_glob_hint(wanted, scope)}'
    return f'no module "{label(wanted)}" in {scope.title or scope}{scope.near(wanted)}'


def _glob_hint(wanted: str, scope: _Scope) -> str:
    deeper = next((path for path in scope.modules if fnmatch.fnmatchcase(path, wanted)), None)
    if deeper is not None:
        return f'; * stays inside one level, but "{deeper}" has more: ** alone between dots is any number of levels'
    levels = (re.sub(r"[*?\[\]]", "", level) for level in wanted.split("."))
    return scope.near(".".join(filter(None, levels)))


# ---------------------------------------------------------------- globs


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern[3:] if pattern.startswith("re:") else translate(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise SiteError(f'the pattern "{pattern}" cannot be read: {error}') from error
