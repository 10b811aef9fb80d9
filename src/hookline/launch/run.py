"""Run a program under a session."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence

from hookline.launch.ending import call
from hookline.launch.options import Options
from hookline.launch.program import Module, NotFound, Program, Script, world
from hookline.launch.session import Session

__all__ = ["run_module", "run_script", "take_over"]


def run_script(path: str | os.PathLike[str], args: Sequence[str] = (), options: Options | None = None) -> int:
    """Run a script as ``python path args...`` would, and record the models that it calls.

    ``sys.argv``, ``sys.path`` and ``__main__`` are put back at the end; modules that the script has imported and
    threads that it has started stay.

    Args:
        path: The script.
        args: What it finds in ``sys.argv[1:]``.
        options: What to record; one step of every output by default.

    Returns:
        Exit status of the script, 0 to 255, or -2 (SIGINT) when it ended in a KeyboardInterrupt. A traceback has been
        printed as Python does. With ``dry``, 2 in the place of 0 when no module that was called has a chosen site.

    Raises:
        OptionError: There is no such script, or a recording of that name exists.
        FormatError: Something else stands in the place of the recording.
    """
    return _run(Script(path, args), options)


def run_module(name: str, args: Sequence[str] = (), options: Options | None = None) -> int:
    """The same for ``python -m name args...``."""
    return _run(Module(name, args), options)


def _run(program: Program, options: Options | None) -> int:
    with Session(options or Options(), program.name) as session, world(program):
        return _called(program, session)


def _called(program: Program, session: Session) -> int:
    try:
        return session.status(call(program.execute))
    except NotFound:
        session.call_off()
        raise


def take_over(name: str, args: Sequence[str], options: Options, *, is_module: bool) -> int:
    """Run a program for which alone this process was started, so that its world stays until the process ends.

    The threads that it leaves behind and the functions that it has registered with atexit are recorded too, since
    Python runs ours after them.

    Args:
        name: The script, or the name of the module.
        args: What the program finds in ``sys.argv[1:]``.
        options: What to record.
        is_module: Whether it is a module.

    Returns:
        As for ``run_script``; the recording is finished when the interpreter exits.

    Raises:
        OptionError, FormatError: As for ``run_script``.
    """
    program = Module(name, args) if is_module else Script(name, args)
    session = Session(options, program.name)
    with world(program, stays=True):
        atexit.register(session.finish)
        session.__enter__()
        return _called(program, session)
