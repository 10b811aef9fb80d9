"""Globs over module paths: ``*``, ``?`` and ``[ab]`` stay inside one level, ``**`` is any number of levels."""

from __future__ import annotations

import re

__all__ = ["translate"]

_ANY_LEVELS = r"(?:[^.]+\.)*"
_TOKEN = re.compile(r"\*+|\[(?:![\s\S]|[^!])[^\]]*\]|[\s\S]")


def translate(glob: str) -> str:
    """An expression for paths in which a dot ends every level, so that the root, which has none, is no exception."""
    parts: list[str] = []
    for level in glob.split("."):
        part = _ANY_LEVELS if level == "**" else _TOKEN.sub(_translate_token, level) + r"\."
        if part != _ANY_LEVELS or parts[-1:] != [part]:  # **.** is **, but tries every split of the levels
            parts.append(part)
    return "".join(parts)


def _translate_token(token: re.Match[str]) -> str:
    text = token[0]
    if text[0] == "*":
        return "[^.]*"
    if len(text) == 1:
        return "[^.]" if text == "?" else re.escape(text)
    negated = text[1] == "!"
    items = re.sub(r"([\s\S])-([\s\S])|[\s\S]", _translate_item, text[2 if negated else 1 : -1])
    return rf"(?!\.)[{'^' if negated else ''}{items}]"


def _translate_item(item: re.Match[str]) -> str:
    return re.escape(item[0]) if item[1] is None else f"{re.escape(item[1])}-{re.escape(item[2])}"
