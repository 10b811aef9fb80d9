"""What is said to the person at the terminal: short lines on stderr."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

__all__ = ["Messages"]


class Messages:
    """Writes to the stderr that there was at the beginning, whatever the script makes of its own.

    Args:
        quiet: Leave out everything but warnings.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._stream: TextIO | None = sys.stderr
        self._quiet = quiet

    def say(self, text: str) -> None:
        """A line that ``quiet`` leaves out."""
        if not self._quiet:
            self._write(f"hookline: {text}")

    def warn(self, text: str) -> None:
        """A line about what did not go as it was asked for."""
        self._write(f"hookline: warning: {text}")

    def _write(self, text: str) -> None:
        # A closed stream must not change how the script ends.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self._stream is not None:
                self._stream.write(" ".join(text.split()) + "\n")
                self._stream.flush()
