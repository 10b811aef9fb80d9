"""What a run says on stderr, for the tests of several rooms."""

from __future__ import annotations


def without_coverage(text: str) -> str:
    """What was said on stderr, less the lines about the coverage."""
    words = ("coverage of", "captured", "bypassed", "not reached", "and ")
    return "".join(
        line for line in text.splitlines(True) if not line.startswith(tuple(f"hookline: {w}" for w in words))
    )
