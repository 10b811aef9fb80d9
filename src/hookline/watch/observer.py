"""What a watch puts at a module: it measures outputs and the gradients that arrive at them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.hooks import Call, Observer, origin_key, when_gradients_arrive
from hookline.hooks.token import original_class
from hookline.record.segment import Segments
from hookline.values import flatten, paths_of
from hookline.watch.running import Running

if TYPE_CHECKING:
    from hookline.watch.session import Session

__all__ = ["ModuleWatch"]

_FIXED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm,
    nn.GroupNorm, nn.ReLU, nn.GELU, nn.SiLU, nn.Embedding, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity,
)  # fmt: skip
"""Modules that use no random numbers."""


class ModuleWatch(Observer):
    """Hands what passes at one module to a session.

    Calls are measured while the session wants it, and only those that train: with gradients enabled, or of a module in
    training mode. What activation checkpointing runs again is not measured again; its gradients belong to the call
    that it repeats.
    """

    sees_input = True
    sees_output = True

    def __init__(self, session: Session, path: str, module: nn.Module, *, output: bool, gradients: bool) -> None:
        self._session: Session | None = session
        self._path = path
        self._type_name = original_class(module).__name__
        self._output, self._gradients = output, gradients
        self._segments = Segments()
        self._is_random = not isinstance(module, _FIXED)

    def let_go(self) -> None:
        """Forget the session: a graph remembers its observers."""
        self._session = None

    def begin(self, call: Call) -> None:
        """Give the call its number."""
        session = self._session
        if session is None or not session.measures:
            return
        module = call.module()
        if module is None or not (call.with_grad or module.training):
            return
        if call.recomputed:
            mark = self._segments.original()
            if mark is None:
                return
            step, number = mark[0], mark[1]
        else:
            step, number = session.step, session.next_call(self._path)
            if not call.with_grad:
                self._segments.note((step, number, None))
        calls = session.stack.calls
        running = Running(self._path, number, step, module, calls[-1] if calls else None)
        running.type_name = self._type_name
        call.marks[self] = running
        calls.append(running)
        if self._is_random:
            running.rng = torch.get_rng_state()

    def on_input(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember who used which value."""
        running, session = call.marks.get(self), self._session
        if running is None or session is None:
            return
        leaves = running.called_with(args, kwargs)
        if self._gradients and call.with_grad:
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.requires_grad and (key := origin_key(leaf)) is not None:
                    session.used(key, running)

    def on_failure(self, call: Call, error: BaseException) -> None:
        """The call is over."""
        running, session = call.marks.pop(self, None), self._session
        if running is not None and session is not None:
            session.leave(running)
            running.let_go()

    def on_output(self, call: Call, output: Any) -> None:
        """Measure it, and its gradients when they come."""
        running, session = call.marks.get(self), self._session
        if running is None or session is None:
            return
        session.leave(running)
        places: tuple[str, ...] = ("",)
        leaves = [output]
        if type(output) is not Tensor:
            leaves, structure = flatten(output)
            places = paths_of(structure, "")
        floating = [
            (place, leaf)
            for place, leaf in zip(places, leaves, strict=True)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
        if self._output and not call.recomputed:
            for place, leaf in floating:
                session.output(running, place, leaf)
        wanting = [(place, leaf) for place, leaf in floating if leaf.requires_grad] if call.with_grad else []
        if self._gradients and wanting:
            self._await(session, running, wanting)
        else:
            running.let_go()

    def _await(self, session: Session, running: Running, wanting: list[tuple[str, Tensor]]) -> None:
        keys = [origin_key(leaf) for _, leaf in wanting]
        fresh = [
            (number, leaf)
            for number, (key, (_, leaf)) in enumerate(zip(keys, wanting, strict=True))
            if key is None or session.is_new(key, running)
        ]
        if session.holds_inputs:
            running.hold()
        running.args, running.kwargs = (), {}
        session.await_gradients(running)
        if fresh:
            places = [place for place, _ in wanting]
            when_gradients_arrive(fresh, functools.partial(self._arrived, running, places, keys))

    def _arrived(self, running: Running, places: list[str], keys: list[Any], number: int, grad: Tensor) -> None:
        session = self._session
        if session is not None:
            session.gradient(running, places[number], keys[number], number, grad)
