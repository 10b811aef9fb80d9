"""Names in messages: the nearest ones to a misspelt name, and what a wrong object is called."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["kind", "name_of", "nearest", "nearest_clause", "quoted"]

_ALIKE = 0.6
"""The likeness from which difflib itself suggests a name."""


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """At most ``count`` names that look like a misspelt one, nearest first; upper and lower case count as the same.

    Names that end alike, after the last dot, come before others: ``conv1`` finds ``features.conv1``, and
    10,000 paths with few different ends are searched quickly.
    """
    known = list(dict.fromkeys(names))
    ends = _alike(_last(name), map(_last, known))
    close = [known_name for known_name in known if _last(known_name) in ends]
    found = [*_alike(name, close), *sorted(close, key=lambda path: ends[_last(path)], reverse=True)]
    if len(close) < count:
        found += _alike(name, known)
    return list(dict.fromkeys(found))[:count]


def _alike(word: str, keys: Iterable[str]) -> dict[str, float]:
    """How alike the keys are, best first; difflib's own function does not keep equals in their order."""
    matcher = difflib.SequenceMatcher(None, "", word.lower(), autojunk=False)
    found = {}
    for key in dict.fromkeys(keys):
        matcher.set_seq1(key.lower())
        if matcher.real_quick_ratio() >= _ALIKE and matcher.quick_ratio() >= _ALIKE and matcher.ratio() >= _ALIKE:
            found[key] = matcher.ratio()
    return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def nearest_clause(name: str, names: Iterable[str], count: int = 3) -> str:
    """The end of a message: the nearest names, or nothing."""
    found = nearest(name, names, count)
    return f"; nearest: {quoted(found)}" if found else ""


def quoted(names: Iterable[str]) -> str:
    """Names in quotes, with commas."""
    return ", ".join(f'"{name}"' for name in names)


def name_of(value: object) -> str:
    """Name of a class or function, else its repr."""
    return getattr(value, "__name__", None) or repr(value)


def kind(value: object) -> str:
    """What a message calls an object of the wrong kind."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
