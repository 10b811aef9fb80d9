"""Random programs in which everything shares memory and is written to: hooks give right gradients or a loud error.

No sane model is like this. That is the point: whatever two tensors a program ties together, a wrong gradient must never
come out in silence.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline
from hookline.errors import SharedMemoryError

# ---------------------------------------------------------------- modules that tie tensors together


class Module(nn.Module):
    """Runs one of the functions below; ``kept`` is what it has put aside."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.function(self, x, other)


def computes(module: Module, x: Tensor, other: Tensor) -> Any:
    return x * 1.5


def hands_on(module: Module, x: Tensor, other: Tensor) -> Any:
    return x


def views(module: Module, x: Tensor, other: Tensor) -> Any:
    return x.t()


def cuts(module: Module, x: Tensor, other: Tensor) -> Any:
    return x[:1]


def chunks(module: Module, x: Tensor, other: Tensor) -> Any:
    return (x * 1.1).chunk(2, 0)


def writes(module: Module, x: Tensor, other: Tensor) -> Any:
    return x.mul_(1.25)


def writes_and_returns_something_else(module: Module, x: Tensor, other: Tensor) -> Any:
    x.mul_(1.25)
    return x.sum() * 0.1


def adds_into(module: Module, x: Tensor, other: Tensor) -> Any:
    return x.add_(other.sum() * 0.2)


def adds(module: Module, x: Tensor, other: Tensor) -> Any:
    return x * 0.5 + other.sum()


def returns_whole_and_part(module: Module, x: Tensor, other: Tensor) -> Any:
    h = x * 0.7
    return h, h[:1]


def returns_input_as_well(module: Module, x: Tensor, other: Tensor) -> Any:
    return x * 0.7, x


def keeps_output(module: Module, x: Tensor, other: Tensor) -> Any:
    module.kept = x * 0.8
    return module.kept


def keeps_input(module: Module, x: Tensor, other: Tensor) -> Any:
    module.kept = x
    return x * 0.8


FUNCTIONS = (
    computes,
    hands_on,
    hands_on,
    views,
    views,
    cuts,
    chunks,
    writes,
    writes_and_returns_something_else,
    adds_into,
    adds,
    returns_whole_and_part,
    returns_input_as_well,
    keeps_output,
    keeps_input,
)


# ---------------------------------------------------------------- writes of the program itself


def scale(draw: random.Random, pool: list[Tensor]) -> None:
    draw.choice(pool).mul_(1.7)


def clamp(draw: random.Random, pool: list[Tensor]) -> None:
    draw.choice(pool).clamp_(min=-0.2)


def scale_a_row(draw: random.Random, pool: list[Tensor]) -> None:
    draw.choice(pool)[0].mul_(0.5)


def add_another(draw: random.Random, pool: list[Tensor]) -> None:
    draw.choice(pool).add_(draw.choice(pool).sum() * 0.3)


def write_without_gradients(draw: random.Random, pool: list[Tensor]) -> None:
    with torch.no_grad():
        draw.choice(pool).add_(0)


def take_a_view(draw: random.Random, pool: list[Tensor]) -> None:
    pool.append(draw.choice((lambda t: t[:, :], lambda t: t[:1]))(draw.choice(pool)))


WRITES = (scale, clamp, scale_a_row, add_another, write_without_gradients, take_a_view, take_a_view)


# ---------------------------------------------------------------- one program


def run(seed: int, observe: Callable[[nn.Module], Any] | None) -> list[Tensor | None]:
    """Gradients of the leaves and all values; ``observe`` is given each module before it runs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    leaves = [torch.randn(2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    pool = [leaf * 1 for leaf in leaves]
    modules: list[Module] = []
    for _ in range(draw.randint(2, 9)):
        if draw.random() < 0.6:
            modules.append(Module(draw.choice(FUNCTIONS)))
            if observe is not None:
                observe(modules[-1])
            _call(draw, modules[-1], pool)
        else:
            draw.choice(WRITES)(draw, pool)
    used = [i for i in range(len(pool)) if draw.random() < 0.5] or [0]
    torch.stack([(i + 1) * 0.3 * pool[i].sum() for i in used]).sum().backward()
    return [leaf.grad for leaf in leaves] + [tensor.detach().clone() for tensor in pool]


def _call(draw: random.Random, module: Module, pool: list[Tensor]) -> None:
    output = module(draw.choice(pool), draw.choice(pool))
    for tensor in output if isinstance(output, tuple) else (output,):
        pool.append(tensor if tensor.dim() == 2 else tensor.expand(2, 2) * 1)
    if module.kept is not None and draw.random() < 0.5:
        pool.append(module.kept)


def backward_hook(module: nn.Module) -> None:
    hookline.register_backward_hook(module, lambda *_: None)


def backward_pre_hook(module: nn.Module) -> None:
    hookline.register_backward_pre_hook(module, lambda *_: None)


def forward_hooks(module: nn.Module) -> None:
    hookline.register_forward_pre_hook(module, lambda *_: None)
    hookline.register_forward_hook(module, lambda *_: None)


def every_hook(module: nn.Module) -> None:
    for observe in (backward_hook, backward_pre_hook, forward_hooks):
        observe(module)


def fate(seed: int, observe: Callable[[nn.Module], Any]) -> str:
    """How a program ends with hooks: ``right``, ``error``, ``wrong``; ``-`` where it is no program without them."""
    try:
        expected = run(seed, None)
    except RuntimeError:
        return "-"
    try:
        found = run(seed, observe)
    except SharedMemoryError:
        return "error"
    except RuntimeError as error:
        return "error" if "modified inplace" in str(error) else f"{type(error).__name__}: {error}"
    close = all(map(_close, found, expected)) and len(found) == len(expected)
    return "right" if close else "wrong"


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def check(seeds: range, observe: Callable[[nn.Module], Any]) -> Counter[str]:
    fates = {seed: fate(seed, observe) for seed in seeds}
    count = Counter(fates.values())
    unexpected = {seed: end for seed, end in fates.items() if end not in ("right", "error", "-")}
    assert not unexpected, f"{unexpected}; of {dict(count)}"
    return count


@pytest.mark.parametrize("observe", [backward_hook, backward_pre_hook, every_hook])
@pytest.mark.parametrize("first", range(0, 300, 100))
def test_no_program_gets_a_wrong_gradient_in_silence(observe: Callable[[nn.Module], Any], first: int) -> None:
    count = check(range(first, first + 100), observe)
    assert count["right"] > count["error"], f"{dict(count)}: most of these programs can be followed"


@pytest.mark.slow
@pytest.mark.parametrize("observe", [backward_hook, backward_pre_hook, every_hook])
@pytest.mark.parametrize("first", range(1000, 6000, 500))
def test_no_program_of_many_gets_a_wrong_gradient_in_silence(observe: Callable[[nn.Module], Any], first: int) -> None:
    check(range(first, first + 500), observe)


def test_forward_hooks_never_stop_a_program() -> None:
    count = check(range(300), forward_hooks)
    assert count["error"] == 0


def test_views_of_one_tensor_one_of_which_a_module_writes_to_and_another_the_caller() -> None:
    """Autograd makes the histories of views anew by their version, which a rebased view must not confuse."""

    def run(observed: bool) -> Tensor | None:
        x = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
        whole = x * 1
        first, second, other = whole[:], whole[:], whole * 0.7
        module = Module(writes_and_returns_something_else)
        if observed:
            backward_hook(module)
        module(second, second)
        first.add_(other)
        (first * 2 + second * 3).sum().backward()
        return x.grad

    assert _close(run(observed=True), run(observed=False))
