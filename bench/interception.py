"""Ways to see a module's calls, side by side: what each sees, what it leaves behind, what it costs.

    python bench/interception.py

The cost is that of one call of Linear(8, 8) with a listener that does nothing, as a ratio to the bare call: medians of
rounds that take the ways in turn.
"""

from __future__ import annotations

import copy
import pickle
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from hookline.hooks import Handle, Observer, attach

CALLS, ROUNDS = 2000, 21


class Listener(Observer):
    """Counts calls."""

    sees_output = True

    def __init__(self) -> None:
        self.count = 0

    def on_output(self, call, output) -> None:
        self.count += 1


def class_swap(module: nn.Module, listener: Listener) -> Callable[[], None]:
    handle: Handle = attach(module, "observer", listener)
    return handle.remove


def torch_hook(module: nn.Module, listener: Listener) -> Callable[[], None]:
    return module.register_forward_hook(lambda *_: listener.on_output(None, None)).remove


def forward_attribute(module: nn.Module, listener: Listener) -> Callable[[], None]:
    inner = module.forward

    def forward(*args, **kwargs):
        output = inner(*args, **kwargs)
        listener.on_output(None, output)
        return output

    module.forward = forward
    return lambda: delattr(module, "forward")


WAYS = {"class swap": class_swap, "PyTorch's hook": torch_hook, "forward attribute": forward_attribute}


def attempt(action: Callable[[], object]) -> str:
    try:
        return "yes" if action() else "NO"
    except Exception as error:
        return type(error).__name__


def judge(name: str) -> list[str]:
    """Answers for one way: forward() seen, copy clean, pickle works, type unchanged."""
    module, listener, x = nn.Linear(8, 8), Listener(), torch.ones(2, 8)
    remove = WAYS[name](module, listener)
    module.forward(x)
    seen = "yes" if listener.count == 1 else "NO"

    def copy_is_clean() -> bool:
        before = listener.count
        twin = copy.deepcopy(module)
        with torch.no_grad():
            twin.weight.zero_()
            twin.bias.zero_()
        return bool((twin(x) == 0).all()) and listener.count == before

    answers = [seen, attempt(copy_is_clean), attempt(lambda: pickle.loads(pickle.dumps(module)) is not None)]
    answers.append("yes" if type(module) is nn.Linear else "NO")
    remove()
    return answers


def seconds(module: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        module(x)
    return time.perf_counter() - start


def costs() -> dict[str, float]:
    modules = {"bare": nn.Linear(8, 8), **{name: nn.Linear(8, 8) for name in WAYS}}
    for name, way in WAYS.items():
        way(modules[name], Listener())
    x, taken = torch.ones(4, 8), {name: [] for name in modules}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, module in modules.items():
                taken[name].append(seconds(module, x))
    bare = statistics.median(taken["bare"])
    return {name: statistics.median(times) / bare for name, times in taken.items()}


def main() -> None:
    torch.set_num_threads(1)
    ratio = costs()
    print(
        f"{'way':20}{'sees .forward()':>17}{'copy is clean':>15}{'pickles':>17}{'type is kept':>14}{'x bare call':>13}"
    )
    for name in WAYS:
        seen, clean, pickles, kept = judge(name)
        print(f"{name:20}{seen:>17}{clean:>17}{pickles:>17}{kept:>17}{ratio[name]:>17.2f}")


if __name__ == "__main__":
    main()
