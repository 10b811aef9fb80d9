"""What one run records: the roots as they turn up, and what is said at the end."""

from __future__ import annotations

import itertools
import os
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from hookline.errors import ArgumentError, OptionError
from hookline.hooks import original_class
from hookline.hooks.roots import RootCalls
from hookline.launch.choice import Choice
from hookline.launch.messages import Messages
from hookline.launch.options import Options
from hookline.launch.root import Root, StepPlanned, stateless_kind
from hookline.launch.sigterm import Sigterm
from hookline.launch.sink import Sink
from hookline.launch.tally import Tally
from hookline.record import Coverage, Plan
from hookline.report.fates import render
from hookline.report.text import plural, size_text
from hookline.sites import Site
from hookline.store import check_free
from hookline.store.folders import size_of

__all__ = ["Session"]

MOST_REASONS = 10
"""Lines of the coverage that are printed; `hookline show --coverage` has all."""

MOST_ROOTS = 100
"""Roots that are recorded, since a script may make ever new ones."""

_NOTHING_CHOSEN = 2
"""Exit status of a plan whose patterns name nothing in the modules that were called."""


class Session:
    """Records a run: a context manager around it.

    Whatever goes wrong in here ends in a warning: the script goes on as it would without us. A forked child goes on
    without us too, since the recording belongs to its parent.

    Args:
        options: What to record.
        name: What the program is called in the recording.

    Raises:
        OptionError: A recording of that name exists.
        FormatError: Something else stands there.
    """

    def __init__(self, options: Options, name: str) -> None:
        self.options = options
        self._name = name
        self._shown = options.place(os.environ)
        self._folder = self._shown.absolute() if options.dry else _checked(self._shown, options.overwrite)
        self._messages = Messages(quiet=options.quiet)
        self._sigterm = Sigterm(self._conclude)
        self.sink: Sink | Tally = (
            Tally(self._messages)
            if options.dry
            else Sink(
                self._folder, options.byte_budget, options.overwrite, self._messages, self._sigterm, self._leave_out
            )
        )
        self.calls = RootCalls(self._before_call, self._after_call)
        self._choice = Choice(options.sites, options.ports)
        self._roots: list[Root] = []
        self._known: dict[int, Root | None] = {}
        self._unchosen: weakref.ref[nn.Module] | None = None
        self._any_called = False
        self._left_out = 0
        self._concluded = False

    def __enter__(self) -> Session:
        self._sigterm.install()
        self.calls.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Take everything off the models, write what waits and say what was recorded; harmless a second time."""
        if not self._is_ours:
            return
        self._remove()
        self._conclude()
        self._sigterm.uninstall()

    def call_off(self) -> None:
        """There is nothing to run after all: say nothing at the end."""
        self._concluded = True

    def status(self, of_program: int) -> int:
        """The exit status, when the program alone would have this one."""
        missed = self.options.dry and self._any_called and not self._roots and self._is_ours
        return of_program or (_NOTHING_CHOSEN if missed else 0)

    @property
    def _is_ours(self) -> bool:
        return os.getpid() == self._sigterm.pid

    # ------------------------------------------------------------ roots

    def _before_call(self, module: nn.Module) -> None:
        if not self._is_ours:
            return
        if not self.sink.is_open:
            self._remove()
            return
        try:
            root = self._root_of(module)
            if root is not None:
                root.before_call()
            elif self.options.dry and not self._roots:
                self._call_without_sites(module)
        except Exception as error:
            self.sink.stop(f"{original_class(module).__name__}: {error}")

    def _call_without_sites(self, module: nn.Module) -> None:
        """Stop a plan when the first model is called once more and no pattern has named anything so far.

        Raises:
            StepPlanned: It is.
        """
        if self._unchosen is None or self._unchosen() is None:
            self._unchosen = weakref.ref(module) if stateless_kind(module) is None else None
        elif self._unchosen() is module:
            raise StepPlanned(_NOTHING_CHOSEN)

    def _after_call(self, module: nn.Module) -> None:
        root = self._known.get(id(module))
        if root is None or not self._is_ours:
            return
        try:
            root.after_call()
        except Exception as error:
            self.sink.stop(f"{original_class(module).__name__}: {error}")

    def _remove(self) -> None:
        self.calls.__exit__()
        for root in self._roots:
            root.close()

    def _root_of(self, module: nn.Module) -> Root | None:
        """None for a module of which nothing is recorded."""
        key = id(module)
        if key not in self._known:
            with self._sigterm.not_now():
                self._any_called = True
                self._known[key] = self._join(module)
                weakref.finalize(module, self._known.pop, key, None).atexit = False
        return self._known[key]

    def _join(self, module: nn.Module) -> Root | None:
        for root in self._roots:
            if root.may_be_followed_by(module) and self._choice.sites(module, root.prefix) == root.sites:
                root.follow(module)
                return root
        prefix = self._free_prefix(original_class(module).__name__)
        sites = self._choice.sites(module, prefix)
        if sites and len(self._roots) == MOST_ROOTS:
            self._left_out += 1
        elif sites:
            return self._new_root(module, prefix, sites)
        return None

    def _new_root(self, module: nn.Module, prefix: str, sites: list[Site]) -> Root | None:
        root = Root(self, prefix, sites)
        try:
            root.follow(module)
        except Exception as error:
            self._messages.warn(f"{original_class(module).__name__} is not recorded: {error}")
            return None
        self._roots.append(root)
        self._describe()
        return root

    def _free_prefix(self, name: str) -> str:
        """The first root needs none."""
        if not self._roots:
            return ""
        taken = {root.prefix for root in self._roots}
        tries = (f"{name}#{number}/" if number > 1 else f"{name}/" for number in itertools.count(1))
        return next(prefix for prefix in tries if prefix not in taken)

    def _describe(self) -> None:
        roots = self._roots
        info = {
            **roots[0].info,
            "script": self._name,
            "sites": [str(Site(root.prefix + site.path, site.port)) for root in roots for site in root.sites],
            "roots": {root.prefix: root.info["model"] for root in roots},
            "coverage": self._coverage().to_json(),
        }
        self.sink.describe(info, {path: module for root in roots for path, module in root.modules.items()})

    def _leave_out(self, event: Any, error: ArgumentError) -> None:
        """A value cannot be stored, so that it does not count as captured."""
        for root in self._roots:
            root.leave_out(event, error)

    def _coverage(self) -> Coverage:
        return Coverage(fate for root in self._roots for fate in root.fates())

    # ------------------------------------------------------------ the end

    def _conclude(self) -> None:
        """Write what waits and say what was recorded; all that is left to do when the process is about to die."""
        with self._sigterm.not_now():
            if not self._concluded:
                self._concluded = True
                self.sink.flush()
                if self._roots and self.sink.is_open:
                    self._describe()
                self.sink.close()
                self._tell()

    def _tell(self) -> None:
        for complaint in self._choice.complaints() if self._any_called else ():
            self._messages.warn(complaint)
        if self._left_out:
            self._messages.warn(
                f"{plural(MOST_ROOTS, 'module')} that the script calls by themselves are recorded; "
                f"{self._left_out} more are not. Choose with --sites."
            )
        if isinstance(self.sink, Tally) and self.sink.exists:
            print(Plan(self._coverage(), self.sink.nbytes), flush=True)
            return
        if self.sink.exists:
            for line in render(self._coverage().values(), most=MOST_REASONS).splitlines():
                self._messages.say(line)
        self._messages.say(self._result())

    def _result(self) -> str:
        if isinstance(self.sink, Sink) and self.sink.exists:
            counts = f"{plural(self.sink.events, 'event')} of {plural(len(self.sink.steps), 'step')}"
            return f"{counts} -> {self._shown} ({size_text(size_of(self._folder))})"
        what = "no module that was called has a chosen site" if self._any_called else "no module was called"
        return f"{what}, so there is {'nothing to plan' if self.options.dry else 'no recording'}."


def _checked(place: Path, overwrite: bool) -> Path:
    """The folder as an absolute path, since the script may change the working folder."""
    try:
        check_free(place, overwrite=overwrite)
    except OptionError as error:
        advice = "Choose another name with -o, or replace it with --overwrite"
        raise OptionError(f"a recording {place} exists already. {advice}.") from error
    return place.absolute()
