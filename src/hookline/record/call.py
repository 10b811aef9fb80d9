"""What was recorded of one module, and of one of its calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from hookline.errors import SiteError
from hookline.record.log import Log
from hookline.sites import label
from hookline.values import Arguments

__all__ = ["CallRecord", "ModuleRecord"]


class _Ports:
    """The four ports as attributes; what was not recorded raises ``SiteError`` with the reason."""

    def _value(self, port: str) -> Any:
        raise NotImplementedError

    @property
    def output(self) -> Any:
        """What the module returned: a tensor, or nested tuples, lists, dicts and named fields of tensors."""
        return self._value("output")

    @property
    def input(self) -> Any:
        """The only argument, or all positional ones as a tuple, or ``(args, kwargs)`` where there were keywords."""
        return _plain_arguments(self._value("input"))

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        return tuple(self._value("input").args)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments."""
        return dict(self._value("input").kwargs)

    @property
    def grad_output(self) -> Any:
        """Gradient of ``output``, nested like it; None where no gradient arrived. Of several backwards the last."""
        return self._value("grad_output")

    @property
    def grad_input(self) -> Any:
        """This call's share of the gradient of ``input``, nested like it; None where none is needed."""
        return _plain_arguments(self._value("grad_input"))


class CallRecord(_Ports):
    """One call of a module.

    Attributes:
        path: The module.
        step: Step of the call.
        writer: Number of the process that made it, such as its rank.
        index: How often the module had run before in this step.
        events: What was kept of it, in order; one for each backward pass where there were several.
    """

    def __init__(self, path: str, step: int, writer: int, index: int, asked: Collection[str]) -> None:
        self.path = path
        self.step = step
        self.writer = writer
        self.index = index
        self.events: list[Any] = []
        self._asked = asked

    def _value(self, port: str) -> Any:
        found = [event for event in self.events if event.port == port]
        if not found:
            where = f"call {self.index} of step {self.step} of {label(self.path)}"
            raise SiteError(_missing(where, port, self._asked, self.events))
        return found[-1].value

    def __repr__(self) -> str:
        ports = ", ".join(dict.fromkeys(event.port for event in self.events))
        return f"<call {self.index} of step {self.step} of {label(self.path)}: {ports}>"


class ModuleRecord(_Ports):
    """All calls of one module.

    ``.output`` and its kin read the only call; where there are several, say which: ``.calls[3].output``.

    Attributes:
        path: The module.
        type_name: Its class; empty where that is not known.
    """

    def __init__(self, path: str, type_name: str, asked: Collection[str], log: Log) -> None:
        self.path = path
        self.type_name = type_name
        self._asked = asked
        self._log = log
        self._grouped: tuple[int, tuple[CallRecord, ...]] = (0, ())

    @property
    def events(self) -> list[Any]:
        """What was kept, in order."""
        return self._log.of(self.path)

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The calls, in the order of steps, processes and calls."""
        changes = self._log.changes(self.path)
        if self._grouped[0] != changes:
            self._grouped = changes, self._group()
        return self._grouped[1]

    def _group(self) -> tuple[CallRecord, ...]:
        found: dict[tuple[int, int, int], CallRecord] = {}
        for event in self.events:
            key = event.step, event.writer, event.call
            if key not in found:
                found[key] = CallRecord(self.path, *key, self._asked)
            found[key].events.append(event)
        return tuple(found[key] for key in sorted(found))

    def _value(self, port: str) -> Any:
        having = [place for place, call in enumerate(self.calls) if any(event.port == port for event in call.events)]
        if not having:
            raise SiteError(self.missing(port))
        if len(having) > 1:
            raise SiteError(
                f"{label(self.path)} has {len(having)} calls with a recorded {port}; say which: "
                f".calls[{having[0]}].{port} to .calls[{having[-1]}].{port}."
            )
        return self.calls[having[0]]._value(port)

    def missing(self, port: str) -> str:
        """Why there is no value at a port."""
        if port in self._asked and not len(self._log):
            return (
                f"{label(self.path)} has no {port}: nothing is recorded so far. Run the model inside the with-block; "
                "of a recording that another process writes, a step is there once it is committed: open it again then."
            )
        return _missing(label(self.path), port, self._asked, self.events)

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        return f"<{label(self.path)} {self.type_name}: {len(self.calls)} calls, {len(self.events)} values>"


def _plain_arguments(value: Any) -> Any:
    if not isinstance(value, Arguments):
        return value
    if value.kwargs:
        return value
    return value.args[0] if len(value.args) == 1 else value.args


def _missing(where: str, port: str, asked: Collection[str], events: Sequence[Any]) -> str:
    seen = list(dict.fromkeys(event.port for event in events))
    if port not in asked:
        there = ", ".join(seen) or "nothing"
        return (
            f"{where} has no {port}: it was not asked for. Recorded there: {there}. "
            f'Ask for it with record(..., ports=("{port}", ...)).'
        )
    if port.startswith("grad"):
        why = "no gradient reached it. Call backward() inside the with-block, on a loss that depends on this module"
    elif not seen:
        why = "it did not run while it was recorded. A container such as nn.ModuleList never runs itself"
    else:
        why = 'the call did not get that far, or keep="last" has put a later value in its place'
    return f"{where} has no {port}: {why}."
