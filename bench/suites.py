"""What is measured: a tiny layer, a network of the shape of ResNet-50, and attaching to very many modules."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from networks import ResNet50, chain, pictures
from timing import Spread, in_turn, ratio, spread, threads, timed
from torch import Tensor, nn
from variants import BARE, TWIN_VARIANTS, VARIANTS, Variant

import hookline

__all__ = ["ATTACH_WAYS", "MODES", "Attaching", "Cell", "Plan", "Row", "attaching", "network_rows"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        tiny_calls, tiny_rounds: Calls of the tiny layer in one sample, and samples.
        batch, side, width: Pictures in a batch, their side in pixels, channels after the first convolution.
        rounds: Samples of the large network, one pass each.
        threads: Threads for the large network; the tiny layer has one.
        chains: Numbers of modules to attach to.
        chain_rounds: How often.
    """

    tiny_calls: int = 1000
    tiny_rounds: int = 15
    batch: int = 8
    side: int = 96
    width: int = 64
    rounds: int = 9
    threads: int = min(2, os.cpu_count() or 1)
    chains: tuple[int, ...] = (1000, 3000, 10_000)
    chain_rounds: int = 5


QUICK = Plan(
    tiny_calls=20,
    tiny_rounds=2,
    batch=2,
    side=32,
    width=8,
    rounds=2,
    threads=1,
    chains=(100, 300, 1000),
    chain_rounds=1,
)
"""Enough to see that everything runs, not to believe a number."""


class Cell(NamedTuple):
    """One way of looking in one mode.

    Attributes:
        seconds: Of one pass, bare or not.
        ratio: To the bare model, round by round.
        events: Values or hook calls in one pass.
        error: What was raised in the place of all that, empty for nothing.
        samples: Seconds of each round.
    """

    seconds: Spread | None
    ratio: Spread | None
    events: int
    error: str
    samples: tuple[float, ...]


class Row(NamedTuple):
    """One variant on one network; ``cells`` by mode."""

    network: str
    variant: str
    cells: dict[str, Cell]


# ---------------------------------------------------------------- one pass


def _forward_only(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def _forward(model: nn.Module, x: Tensor) -> None:
    model(x)


def _forward_backward(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


MODES: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "forward, no_grad": _forward_only,
    "forward": _forward,
    "forward + backward": _forward_backward,
}


# ---------------------------------------------------------------- networks


def network_rows(plan: Plan, told: Callable[[str], None]) -> Iterator[Row]:
    """Every row of the table of networks; ``told`` hears what comes next."""
    torch.manual_seed(0)
    tiny, x = nn.Linear(8, 8), torch.randn(1, 8, requires_grad=True)
    with threads(1):
        told("Linear(8, 8)")
        yield from _rows("Linear(8, 8)", tiny, x, VARIANTS, plan.tiny_rounds, plan.tiny_calls)
    images = pictures(plan.batch, plan.side)
    with threads(plan.threads):
        for name, inplace, variants in (("ResNet-50", True, VARIANTS), ("without in-place", False, TWIN_VARIANTS)):
            told(name)
            yield from _rows(name, ResNet50(inplace=inplace, width=plan.width), images, variants, plan.rounds, 1)


def _rows(
    network: str, model: nn.Module, x: Tensor, variants: Sequence[Variant], rounds: int, calls: int
) -> Iterable[Row]:
    fresh = copy.deepcopy(model)
    cells: dict[str, dict[str, Cell]] = {variant.name: {} for variant in variants}
    for mode, one_pass in MODES.items():
        for each in (fresh, model):
            each.train(one_pass is not _forward_only)
        samplers = [_Sampler(variant, fresh if variant.fresh else model, one_pass, x, calls) for variant in variants]
        for name, cell in _measured(samplers, rounds).items():
            cells[name][mode] = cell
    return [Row(network, name, of_mode) for name, of_mode in cells.items()]


def _measured(samplers: Sequence[_Sampler], rounds: int) -> dict[str, Cell]:
    sound = {sampler.name: sampler.sample for sampler in samplers if not sampler.error}
    times = in_turn(sound, rounds)
    bare = times[BARE.name]
    found = {}
    for sampler in samplers:
        name, events, error = sampler.name, sampler.events, sampler.error
        mine = times.get(name, [])
        found[name] = Cell(
            spread(mine) if mine else None, ratio(mine, bare) if mine else None, events, error, tuple(mine)
        )
    return found


class _Sampler:
    """Times one variant in one mode. The first pass is for warmth, for counting, and to see whether it works at all."""

    def __init__(
        self, variant: Variant, model: nn.Module, one_pass: Callable[[nn.Module, Tensor], None], x: Tensor, calls: int
    ) -> None:
        self.name = variant.name
        self._variant, self._model, self._pass, self._x, self._calls = variant, model, one_pass, x, calls
        self.events, self.error = 0, ""
        installed = variant.install(model)
        try:
            one_pass(model, x)
            self.events = installed.events()
        except RuntimeError as error:
            self.error = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            installed.remove()

    def sample(self) -> float:
        """Seconds of one pass, the mean of several; attaching and freeing what was kept are not in it."""
        installed = self._variant.install(self._model)
        try:
            return timed(self._run) / self._calls
        finally:
            installed.remove()

    def _run(self) -> None:
        model, one_pass, x = self._model, self._pass, self._x
        for _ in range(self._calls):
            one_pass(model, x)


# ---------------------------------------------------------------- attaching


class Attaching(NamedTuple):
    """Microseconds per module to attach and to remove again, by way and number of modules."""

    way: str
    by_modules: dict[int, Spread]


def _stock(model: nn.Module) -> None:
    _put_on_and_off(model, lambda module, hook: module.register_forward_hook(hook))


def _hooks(model: nn.Module) -> None:
    _put_on_and_off(model, hookline.register_forward_hook)


def _put_on_and_off(model: nn.Module, register: Callable[[nn.Module, Any], Any]) -> None:
    handles = [register(module, lambda *_: None) for module in model]  # type: ignore[attr-defined]
    for handle in handles:
        handle.remove()


def _record(model: nn.Module) -> None:
    with hookline.record(model):
        pass


ATTACH_WAYS: dict[str, Callable[[nn.Module], None]] = {
    "PyTorch forward hooks": _stock,
    "hookline forward hooks": _hooks,
    "hookline.record": _record,
}


def attaching(plan: Plan) -> list[Attaching]:
    """How long it takes to attach to a row of modules and to remove everything again."""
    models = {count: chain(count) for count in plan.chains}
    samples = {
        f"{way} {count}": _attach_sample(attach, model, count)
        for way, attach in ATTACH_WAYS.items()
        for count, model in models.items()
    }
    for sample in samples.values():
        sample()
    times = in_turn(samples, plan.chain_rounds)
    return [
        Attaching(way, {count: spread([1e6 * seconds for seconds in times[f"{way} {count}"]]) for count in models})
        for way in ATTACH_WAYS
    ]


def _attach_sample(attach: Callable[[nn.Module], None], model: nn.Module, count: int) -> Callable[[], float]:
    return lambda: timed(lambda: attach(model)) / count
