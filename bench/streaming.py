"""Recording to disk inside the forwards of a network of the shape of ResNet-50, against plain hooks that write."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from measured import Measured, at_most
from networks import ResNet50, pictures
from suites import QUICK, Plan
from timing import in_turn, ratio, spread, threads, timed
from torch import Tensor, nn
from writing import write_tensor

import hookline

__all__ = ["streaming"]

BOUND = at_most(1.25)

Chosen = Callable[[str, nn.Module], bool]
Way = Callable[[nn.Module, Chosen, Path], AbstractContextManager[object]]
"""Writes the outputs of the chosen modules under a folder while it is entered; at its end the disk has them."""

CHOSEN: dict[str, Chosen] = {
    "all modules": lambda path, module: True,
    "convolutions": lambda path, module: isinstance(module, nn.Conv2d),
}


def streaming(quick: bool, folder: Path) -> Iterator[Measured]:
    """Time per forward inside the with-block, and of the whole block with what follows the last forward."""
    plan = QUICK if quick else Plan()
    forwards, rounds = (2, 2) if quick else (8, 5)
    model, images = ResNet50(inplace=True, width=plan.width).eval(), pictures(plan.batch, plan.side)
    with threads(plan.threads), torch.no_grad():
        model(images)
        for chosen, wanted in CHOSEN.items():
            with hookline.record(model, wanted) as rec:
                model(images)
            size = f"{len(rec)} outputs of {chosen}, {rec.nbytes / 1e6:.1f} MB a forward"
            del rec
            blocks = _Blocks(model, images, wanted, folder, forwards)
            inside = in_turn({name: blocks.sampler(name, way) for name, way in WAYS.items()}, rounds)
            bare = inside[BARE]
            for name in WAYS:
                if name != BARE:
                    mine, bound = inside[name], BOUND if name == OURS else None
                    what = f"{name}, {size}"
                    yield Measured(f"{what}: in a forward", BARE, ratio(mine, bare), bound, _ms(mine))
                    whole = blocks.whole[name]
                    yield Measured(f"{what}: to the end", BARE, ratio(whole, bare), None, _ms(whole))


def _ms(times: list[float]) -> str:
    return f"{1e3 * spread(times).median:.0f} ms a forward"


class _Blocks:
    """Samples with-blocks; ``whole`` has what each took with its end, by way, in seconds per forward."""

    def __init__(self, model: nn.Module, images: Tensor, wanted: Chosen, folder: Path, forwards: int) -> None:
        self._model, self._images, self._wanted, self._folder = model, images, wanted, folder
        self._forwards = forwards
        self.whole: dict[str, list[float]] = defaultdict(list)

    def sampler(self, name: str, way: Way) -> Callable[[], float]:
        def sample() -> float:
            place = Path(tempfile.mkdtemp(dir=self._folder))
            inside: list[float] = []
            try:
                whole = timed(lambda: self._block(way, place, inside))
            finally:
                shutil.rmtree(place)
            self.whole[name].append(whole / self._forwards)
            return inside[0] / self._forwards

        return sample

    def _block(self, way: Way, place: Path, inside: list[float]) -> None:
        with way(self._model, self._wanted, place):
            start = time.perf_counter()
            for _ in range(self._forwards):
                self._model(self._images)
            inside.append(time.perf_counter() - start)


# ---------------------------------------------------------------- the ways


@contextmanager
def _bare(model: nn.Module, wanted: Chosen, place: Path) -> Iterator[None]:
    yield


def _ours(model: nn.Module, wanted: Chosen, place: Path) -> AbstractContextManager[object]:
    return hookline.record(model, wanted, to=place / "run.hookline")


def _in_memory(model: nn.Module, wanted: Chosen, place: Path) -> AbstractContextManager[object]:
    return hookline.record(model, wanted)


@contextmanager
def _torch_save(model: nn.Module, wanted: Chosen, place: Path) -> Iterator[None]:
    numbers = itertools.count()
    with _hooks(model, wanted, lambda output: torch.save(output, place / f"{next(numbers)}.pt")):
        yield
    for path in place.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _raw(model: nn.Module, wanted: Chosen, place: Path) -> Iterator[None]:
    with open(place / "raw", "wb", buffering=0) as file:
        with _hooks(model, wanted, lambda output: write_tensor(file.fileno(), output.contiguous())):
            yield
        os.fsync(file.fileno())


@contextmanager
def _hooks(model: nn.Module, wanted: Chosen, save: Callable[[Tensor], object]) -> Iterator[None]:
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        save(output)

    chosen = [module for path, module in model.named_modules() if wanted(path, module)]
    handles = [module.register_forward_hook(hook) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


BARE, OURS = "bare forward", "hookline.record(to=...)"
WAYS: dict[str, Way] = {
    BARE: _bare,
    OURS: _ours,
    "hookline.record in memory": _in_memory,
    "hooks that torch.save": _torch_save,
    "hooks that write raw": _raw,
}
