"""One root of a run: its recorder, which counts the root's own calls and gives its values to the session."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hookline.errors import ArgumentError
from hookline.hooks import original_class
from hookline.record import Recorder
from hookline.record.coverage import Fate
from hookline.record.policy import Policy
from hookline.record.segment import Mark
from hookline.record.steps import Step, Steps
from hookline.sites import Site
from hookline.store import ModuleInfo
from hookline.values import Structure, keep

if TYPE_CHECKING:
    from hookline.launch.session import Session

__all__ = ["Root", "StepPlanned", "stateless_kind"]


class StepPlanned(SystemExit):
    """Ends the script, whose first step has told what there is to know; its code is the exit status."""


_NO_STEP = -1
"""The step of calls that are made while another root runs, or none; no option wants it."""


class Root:
    """A module that the script calls by itself.

    Losses and activations are often made anew for every use. A root that has no state of its own is therefore followed
    by the next one of its kind once it is gone, and goes on with the number of its steps.

    Attributes:
        prefix: What stands before its paths in the recording.
        sites: What is recorded of it; paths without the prefix.
        module: The module; a weak reference, so that it lives no longer than it would without us.
        modules: What the recording says of its modules.
    """

    def __init__(self, session: Session, prefix: str, sites: list[Site]) -> None:
        self.prefix = prefix
        self.sites = sites
        self.session = session
        self._kind: type | None = None
        self.module: weakref.ref[nn.Module] | None = None
        self.modules: dict[str, ModuleInfo] = {}
        self.info: dict[str, Any] = {}
        self._recorder: _RootRecorder | None = None
        self._has_gradients = any(site.port.startswith("grad") for site in sites)
        self._gradients_arrived = False

    @property
    def is_running(self) -> bool:
        """Whether this thread is in a call of the root by itself."""
        current = self.session.calls.current
        return current is not None and self.module is not None and self.module() is current

    def may_be_followed_by(self, module: nn.Module) -> bool:
        """Whether our module is gone, and one of its class has nothing that would tell it from ours."""
        is_gone = self.module is not None and self.module() is None
        return is_gone and self._kind is stateless_kind(module) is not None

    def follow(self, module: nn.Module) -> None:
        """Record this module from its next call on."""
        self.module, self._kind = weakref.ref(module), stateless_kind(module)
        if self._is_over(self._step + 1):
            return
        recorder = _RootRecorder(module, self, self._step)
        if self._recorder is not None:
            recorder.evidence = self._recorder.evidence
        self.modules = {self.prefix + path: self._prefixed(info) for path, info in recorder.recording.modules.items()}
        self.info = recorder.recording.info
        recorder.__enter__()
        recorder.model = None  # or it would keep the model alive
        self._recorder = recorder

    def _prefixed(self, info: ModuleInfo) -> ModuleInfo:
        return dataclasses.replace(info, aliases=tuple(self.prefix + alias for alias in info.aliases))

    def before_call(self) -> None:
        """A call begins: take everything off the module when the gradients of the last step have come.

        Raises:
            StepPlanned: The step that was to be planned is over.
        """
        if self.session.options.dry and self._kind is None and self._step >= 0:
            raise StepPlanned
        if self._gradients_arrived and self._is_over(self._step + 1):
            self.close()

    def after_call(self) -> None:
        """A call has ended, and with it the step where no gradients are wanted."""
        if not self._has_gradients:
            self.session.sink.flush()
            if self._is_over(self._step + 1):
                self.close()

    @property
    def _step(self) -> int:
        return -1 if self._recorder is None else self._recorder.step

    def _is_over(self, step: int) -> bool:
        """Whether nothing is wanted from this step on."""
        last = self.session.options.last_step
        return last is not None and step > last

    def close(self) -> None:
        """Take everything off the module."""
        if self._recorder is not None:
            self.session.sink.flush()  # what cannot be stored has to be known before the coverage is final
            self._recorder.close()

    def leave_out(self, event: Any, error: ArgumentError) -> None:
        """A value cannot be stored; it is one of ours where the path is."""
        path = event.path.removeprefix(self.prefix)
        if self._recorder is not None and event.path == self.prefix + path and path in self._recorder.evidence:
            self._recorder.evidence[path].leave_out(event.port, event.backward, error)

    def fates(self) -> list[Fate]:
        """What became of each site, with the prefix."""
        if self._recorder is None:
            return []
        found = ((Site.parse(fate.site), fate) for fate in self._recorder.coverage().values())
        return [fate._replace(site=str(Site(self.prefix + site.path, site.port))) for site, fate in found]

    def saw(self, port: str, step: int) -> None:
        """A value of a step has come."""
        if port.startswith("grad") and step == self.session.options.last_step:
            self._gradients_arrived = True


def stateless_kind(module: nn.Module) -> type | None:
    """The class of a module that has no state; None for one that has."""
    has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    return None if has_state else original_class(module)


class _OwnSteps(Steps):
    """Counts only calls of the root by itself: a call inside another root belongs to a step of that one.

    Args:
        root: Whose calls.
        latest: Number of the step before the first.
    """

    def __init__(self, root: Root, latest: int) -> None:
        super().__init__(first=latest + 1)
        self._root = root
        self._elsewhere = Step(_NO_STEP)

    def begin(self) -> int:
        """Begin a step; returns the number of the one before it, -1 where there is none."""
        return super().begin() if self._root.is_running else -1

    @property
    def current(self) -> Step:
        """The step that this thread is in."""
        return super().current if self._root.is_running else self._elsewhere


class _RootRecorder(Recorder):
    """Keeps nothing: values go to the sink, which orders those of all roots."""

    def __init__(self, module: nn.Module, root: Root, latest: int) -> None:
        super().__init__(module, root.sites, Policy())
        self.steps = _OwnSteps(root, latest)
        self.wanted = root.session.options.wants  # also when the sink is closed: the coverage says what it has missed
        self.on_step = lambda step: root.session.sink.flush()
        self._root = root

    def put(self, site: Site, mark: Mark, backward: int, structure: Structure, leaves: list[Any]) -> bool:
        """Give one value of one call to the sink, if it has room; whatever goes wrong ends the recording."""
        if not self.wanted(mark[0]):
            return False
        root, sink, taken = self._root, self._root.session.sink, False
        site = Site(root.prefix + site.path, site.port)
        try:
            if sink.has_room(site, sum(self.policy.nbytes(leaf) for leaf in leaves if isinstance(leaf, Tensor))):
                kept = [self.policy.capture(leaf, site) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                sink.put(site, mark, backward, keep(structure, kept))
                taken = True
        except Exception as error:
            sink.stop(f"{site} cannot be kept: {error}")
        root.saw(site.port, mark[0])
        return taken
