"""Make a new recording of what is whole in a damaged one, which stays as it is.

  hookline repair run.hookline -o repaired.hookline

The new recording has every commit whose line and shards are as they were written; shards are hard-linked where that is
possible, and copied elsewhere. What is left out is printed: damaged commits with the sites and steps that they held,
where their line can still be read, and leftovers that never counted, such as unfinished lines. The exit status is 0
when nothing was lost, 1 when something was, and 2 for a mistake in what was asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hookline.cli.parser import Parser, encodable, parser_of
from hookline.report.text import plural
from hookline.store import repair

__all__ = ["main", "parser"]

_LOST = 1


def parser() -> Parser:
    """The options."""
    made = parser_of(sys.modules[__name__], "DIR -o NEW")
    made.add_argument("folder", metavar="DIR", help="a recording, such as run.hookline; nothing in it is changed")
    made.add_argument("-o", "--output", metavar="NEW", required=True, help="the recording to make")
    return made


def main(argv: Sequence[str], *, own_process: bool) -> int:
    """Repair, and say what was left out.

    Args:
        argv: What stands behind ``hookline repair``.
        own_process: Makes no difference here.

    Returns:
        Exit status: 1 when something was lost.
    """
    given = parser().parse_args(argv)
    done = repair(given.folder, given.output)
    for word, lines in (("lost", done.lost), ("left out", done.left_out)):
        for line in lines:
            print(encodable(f"{word}: {' '.join(line.split())}"))
    kept = f"{plural(done.commits, 'commit')} with {plural(done.events, 'event')} saved"
    lost = f"{plural(len(done.lost), 'thing')} lost" if done.lost else "nothing lost"
    print(encodable(f"{Path(given.output).name}: {kept}, {lost}"), flush=True)
    return _LOST if done.lost else 0
