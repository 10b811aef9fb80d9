"""Which modules of a root are recorded, when patterns are meant for several roots and need not match in each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from hookline.errors import SiteError
from hookline.hooks import unreachable
from hookline.report.text import plural
from hookline.sites import Site, canonical_paths, label, match_paths, resolve

__all__ = ["Choice"]


class Choice:
    """Patterns, and which of them have matched so far.

    Args:
        patterns: As in ``hookline.record``; one that begins with the prefix of a root means that root alone.
        ports: For patterns that name none.
    """

    def __init__(self, patterns: Sequence[str], ports: Sequence[str]) -> None:
        self._patterns = patterns
        self._ports = ports
        self._unmatched = dict.fromkeys(patterns)
        self._paths: dict[str, None] = {}
        self._out_of_sight: dict[str, None] = {}

    def sites(self, root: nn.Module, prefix: str) -> list[Site]:
        """The sites of a root that the patterns name; empty when there is none."""
        self._paths.update(dict.fromkeys(prefix + path for path in canonical_paths(root)))
        chosen = {pattern: _inside(pattern, prefix) for pattern in self._patterns}
        found = [
            pattern for pattern, inside in chosen.items() if _resolve(root, [inside.removeprefix("!")], self._ports)
        ]
        for pattern in found:
            self._unmatched.pop(pattern, None)
        if not any(_includes(pattern) for pattern in found) and any(map(_includes, self._patterns)):
            return []
        sites = _resolve(root, [chosen[pattern] for pattern in found] or ["**"], self._ports)
        return self._in_sight(root, sites, prefix)

    def _in_sight(self, root: nn.Module, sites: list[Site], prefix: str) -> list[Site]:
        """Nothing where no call can be seen at all; a part that cannot be seen is told by the coverage."""
        modules = dict(root.named_modules())
        if not unreachable(root) and not all(unreachable(modules[site.path]) for site in sites):
            return sites
        self._out_of_sight.update(dict.fromkeys(prefix + site.path for site in sites))
        return []

    def complaints(self) -> list[str]:
        """What is wrong with each pattern that has matched in no root, with the nearest names, and what was hidden."""
        texts = [text for pattern in self._unmatched if (text := self._complaint(pattern))]
        if self._out_of_sight:
            first = label(next(iter(self._out_of_sight)))
            count = plural(len(self._out_of_sight), "chosen module")
            texts.append(f"{count} cannot be recorded, since Python does not call them: {first}, for instance.")
        return texts

    def _complaint(self, pattern: str) -> str:
        try:
            match_paths(pattern.removeprefix("!"), self._paths)
        except SiteError as error:
            return str(error)
        return ""


def _includes(pattern: str) -> bool:
    return not pattern.startswith("!")


def _inside(pattern: str, prefix: str) -> str:
    """The pattern as the root itself knows it."""
    sign = "" if _includes(pattern) else "!"
    return sign + pattern.removeprefix("!").removeprefix(prefix)


def _resolve(root: nn.Module, patterns: list[str], ports: Iterable[str]) -> list[Site]:
    try:
        return resolve(root, patterns, ports)
    except SiteError:
        return []
