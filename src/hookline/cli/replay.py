"""Run the module of an incident once more, and print the operation that made the first non-finite value.

  hookline replay run.hookline/incidents/0
  hookline replay run.hookline/incidents/0 --module model.py:make_model

The bundle has the module, its arguments and the states of the random numbers. The exit status is 0 when a non-finite
value came out again, 1 when none did, and 2 for a mistake in what was asked for.

It runs code: of the source files in the bundle, imports and definitions are executed, and then the module. Replay
bundles that you or people you trust have made. hookline show reads one without running anything.

With --module, the function returns the module, or (module, args, kwargs). That is needed where a part of the module
could not be stored, and of use to try a change. Its file is run.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from hookline.cli.called import called
from hookline.cli.parser import Parser, encodable, parser_of
from hookline.watch.bundle import load_bundle
from hookline.watch.zoom import Zoom

__all__ = ["main", "parser"]

_NOT_REPRODUCED = 1


def parser() -> Parser:
    """The options."""
    made = parser_of(sys.modules[__name__], "BUNDLE [options]")
    made.add_argument("folder", metavar="BUNDLE", help="the folder of an incident")
    made.add_argument("--module", metavar="FILE.py:FUNCTION", help="take the module that this function returns")
    made.add_argument("--json", action="store_true", help="print an object for programs")
    return made


def main(argv: Sequence[str], *, own_process: bool) -> int:
    """Replay, and print what was seen.

    Args:
        argv: What stands behind ``hookline replay``.
        own_process: Makes no difference here.

    Returns:
        Exit status: 1 when nothing non-finite came out.
    """
    given = parser().parse_args(argv)
    module = given.module
    with contextlib.nullcontext() if module is None else called(module, "--module", "model.py:make_model") as make:
        bundle = load_bundle(given.folder, make)
        found = bundle.replay()
    incident = bundle.about.get("incident", {})
    if given.json:
        text = json.dumps({"incident": incident, "zoom": found.to_json()}, allow_nan=False)
    else:
        text = _text(incident, found)
    print(encodable(text), flush=True)
    return 0 if found.reproduced else _NOT_REPRODUCED


def _text(incident: dict[str, Any], found: Zoom) -> str:
    told = incident.get("message")
    head = f"step {incident.get('step', '?')}: {told}\n" if told else ""
    return head + str(found)
