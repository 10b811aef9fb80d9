"""Random trees of modules that pass containers, write in place and share modules: right values, gradients and bits.

Every tree is built twice: as it is, and without any write in place. The second one, with each call cloned in and cloned
out, is differentiated with torch.autograd.grad and says what stands at the boundary of each call of the first.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hookline

from .reference import Computes, close, equal, leaf, leaves_of, mapped, vector

WIDTH = 4
PORTS = ("input", "output", "grad_input", "grad_output")
State = tuple[Tensor, Tensor, Tensor]
"""What flows: two tensors (batch, WIDTH) and an integer tensor (batch,)."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """A module of the tree. ``takes`` and ``gives``: how its arguments and its output are packed."""

    kind: str
    takes: str = "positional"
    gives: str = "tuple"
    way: int = 0
    parts: tuple[Spec, ...] = ()

    def any(self, *kinds: str) -> bool:
        return self.kind in kinds or any(part.any(*kinds) for part in self.parts)


# ---------------------------------------------------------------- containers


@dataclasses.dataclass
class Pair:
    x: Tensor
    rest: list[Tensor]
    index: Tensor
    note: str = "not a tensor"


class Named(NamedTuple):
    x: Tensor
    y: Tensor
    index: Tensor


PACKS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], Callable[[Any], State]]] = {
    "tuple": (lambda x, y, i: (x, y, i), lambda v: v),
    "list": (lambda x, y, i: [i, y, x], lambda v: (v[2], v[1], v[0])),
    "dict": (lambda x, y, i: {"x": x, "y": y, "count": 3, "index": i}, lambda v: (v["x"], v["y"], v["index"])),
    "nested": (
        lambda x, y, i: {"deep": [x, (i, {"y": y})], "nothing": None},
        lambda v: (v["deep"][0], v["deep"][1][1]["y"], v["deep"][1][0]),
    ),
    "dataclass": (lambda x, y, i: Pair(x, [y], i), lambda v: (v.x, v.rest[0], v.index)),
    "namedtuple": (lambda x, y, i: Named(x, y, i), lambda v: (v.x, v.y, v.index)),
}
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "positional": lambda x, y, i: ((x, y, i), {}),
    "keywords": lambda x, y, i: ((), {"x": x, "y": y, "index": i}),
    "mixed": lambda x, y, i: ((x,), {"index": i, "y": y, "flag": True}),
} | {name: lambda x, y, i, pack=pack: ((pack(x, y, i),), {}) for name, (pack, _) in PACKS.items()}


def arguments_of(takes: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
    if takes in PACKS:
        return PACKS[takes][1](args[0])
    return (*args, *(kwargs[name] for name in ("x", "y", "index")[len(args) :]))  # type: ignore[return-value]


# ---------------------------------------------------------------- modules


class Block(nn.Module):
    """One module of the tree; ``inplace`` is what the reference leaves out."""

    def __init__(self, spec: Spec, inplace: bool) -> None:
        super().__init__()
        self.spec, self.inplace = spec, inplace
        for name, make in WEIGHTS.get(spec.kind, {}).items():
            setattr(self, name, make(inplace))
        for place, part in enumerate(spec.parts):
            setattr(self, f"part{place}", Block(part, inplace))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = BODIES[self.spec.kind](self, *arguments_of(self.spec.takes, args, kwargs))
        if self.spec.gives == self.spec.takes == "dict":  # the dict it got, changed
            args[0].update(zip(("x", "y", "index"), state, strict=True))
            return args[0]
        return PACKS[self.spec.gives][0](*state)

    def run(self, place: int, x: Tensor, y: Tensor, index: Tensor) -> State:
        part: Block = getattr(self, f"part{place}")
        args, kwargs = CALLS[part.spec.takes](x, y, index)
        return PACKS[part.spec.gives][1](part(*args, **kwargs))


class Turn(nn.Module):
    """A module between complex tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, z: Tensor) -> Tensor:
        return z * self.by


def linear(inplace: bool) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


WEIGHTS: dict[str, dict[str, Callable[[bool], nn.Module]]] = {
    "linear": {"linear": linear},
    "relu": {"linear": linear, "act": lambda inplace: nn.LeakyReLU(0.1, inplace)},
    "tanh": {"linear": linear, "act": lambda inplace: nn.Tanh(), "drop": lambda inplace: nn.Dropout(0.5).eval()},
    "norm": {"norm": lambda inplace: nn.BatchNorm1d(WIDTH)},
    "dropout": {"drop": lambda inplace: nn.Dropout(0.3)},
    "halves": {"wide": lambda inplace: nn.Linear(WIDTH, 2 * WIDTH)},
    "chunks": {"wide": lambda inplace: nn.Linear(WIDTH, 2 * WIDTH)},
    "embed": {"embed": lambda inplace: nn.Embedding(WIDTH, WIDTH)},
    "cell": {"cell": lambda inplace: nn.LSTMCell(WIDTH, WIDTH)},
    "complex": {"turn": lambda inplace: Turn()},
    "passes": {"linear": linear},
    "identity": {"identity": lambda inplace: nn.Identity()},
    "ignores": {"linear": linear},
    "lends": {"linear": linear},
}


# ---------------------------------------------------------------- what leaves of the tree compute


def body_linear(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    return block.linear(x), y * 0.5, index


def body_relu(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    return block.act(block.linear(x)), y * 0.5 + x, index


def body_tanh(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    return block.act(block.drop(block.linear(x))), y * x, index


def body_norm(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    return block.norm(x + y), y * 0.5, x.argmax(1)


def body_dropout(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    return block.drop(x), block.drop(y), index


def body_halves(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    both = block.wide(x)
    return both[:, :WIDTH], both[:, WIDTH:], index


def body_chunks(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    first, second = block.wide(x + y).chunk(2, 1)
    return first, second, index


def body_embed(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    return x * block.embed(index), y * 0.5, (index + 1) % WIDTH


def body_cell(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    hidden, cell = block.cell(x, (y, x))
    return hidden, cell, index


def body_complex(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    z = block.turn(torch.complex(x, y))
    return z.real * 1, z.imag * 1, index


def body_passes(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    return block.linear(x), y, index


def body_identity(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    return block.identity(x), x + y, index


def body_ignores(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    x = block.linear(x)
    return x, (x * 2).detach(), index


def body_writes(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    """Writes into its argument; only ``lends`` calls it."""
    return written(x, y, block.spec.way, block.inplace), y * 0.5, index


# ---------------------------------------------------------------- what branches of the tree compute


def body_sequence(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    state = x, y, index
    for place in range(len(block.spec.parts)):
        state = block.run(place, *state)
    return state


def body_residual(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    h, y, index = block.run(0, x, y, index)
    if block.inplace and owned(block.spec.parts[0]):
        h += x
    else:
        h = h + x
    return h, y, index


def body_repeated(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    """One module, called two to four times."""
    for _ in range(2 + block.spec.way):
        h, y, index = block.run(0, x * 0.5, y, index)
        x = h + x
    return x, y, index


def body_parallel(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    first, one, index = block.run(0, x, y, index)
    second, other, index = block.run(1, x, y, index)
    return first + second * 0.5, one * other, index


def body_detour(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    """A branch that is cut off, on its way in or on its way out."""
    h, z, index = block.run(0, x.detach() if block.spec.way else x, y, index)
    return x + (h if block.spec.way else h.detach()) * 0.1, z * 1, index


def body_no_grad(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    with torch.no_grad():
        h, _, index = block.run(0, x, y, index)
    h = h.detach()  # a module that hands on its input hands on the input's graph
    return x * h, y + h, index


def body_unused(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    """Of one part no output is used, of the other only one."""
    block.run(0, x, y, index)
    h, _, index = block.run(1, y, x, index)
    return h * 1, y * 0.5, index


def body_writes_output(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    """Writes into what a module gave."""
    h, z, index = block.run(0, x, y, index)
    h = h if owned(block.spec.parts[0]) else h * 1
    return written(h, z, block.spec.way, block.inplace) * 1.5, z * 0.5, index


def body_lends(block: Block, x: Tensor, y: Tensor, index: Tensor) -> State:
    """Lets a module write into a tensor and goes on with that tensor, under the old name or under the new one."""
    h = block.linear(x) * 1
    got, y, index = block.run(0, h, y, index)
    return (h if block.inplace and block.spec.way else got) * 1, y, index


def written(h: Tensor, other: Tensor, way: int, inplace: bool) -> Tensor:
    """``h`` with a part of it changed: in place, through a view; or without a write, to the same value."""
    return (WRITES if inplace else PURE)[way](h, other)


def scale_columns(h: Tensor, other: Tensor) -> Tensor:
    h[:, 1:3].mul_(2)
    return h


def add_to_a_row(h: Tensor, other: Tensor) -> Tensor:
    h[0] += other[1]
    return h


def squash_through_views_of_views(h: Tensor, other: Tensor) -> Tensor:
    h.t()[:2].sigmoid_()
    return h


def set_columns(h: Tensor, other: Tensor) -> Tensor:
    h[:, 2:] = other[:, :2]
    return h


def add_all(h: Tensor, other: Tensor) -> Tensor:
    return h.add_(other, alpha=0.3)


WRITES = (scale_columns, add_to_a_row, squash_through_views_of_views, set_columns, add_all)
PURE: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda h, other: torch.cat([h[:, :1], h[:, 1:3] * 2, h[:, 3:]], 1),
    lambda h, other: torch.cat([h[:1] + other[1:2], h[1:]]),
    lambda h, other: torch.cat([h[:, :2].sigmoid(), h[:, 2:]], 1),
    lambda h, other: torch.cat([h[:, :2], other[:, :2]], 1),
    lambda h, other: h + 0.3 * other,
)

BODIES: dict[str, Callable[[Block, Tensor, Tensor, Tensor], State]] = {
    name.removeprefix("body_"): body for name, body in list(globals().items()) if name.startswith("body_")
}


def owned(spec: Spec) -> bool:
    """Whether x of the output may be written to: it is nobody else's memory, and no backward pass needs its value."""
    if spec.kind == "sequence":
        return owned(spec.parts[-1])
    return spec.kind not in ("relu", "tanh", "chunks", "cell", "identity")


# ---------------------------------------------------------------- drawing trees

TAKES, GIVES = st.sampled_from(sorted(CALLS)), st.sampled_from(sorted(PACKS))
LEAVES = ("linear", "relu", "tanh", "norm", "dropout", "halves", "chunks", "embed", "cell", "complex", "passes")
LEAVES = (*LEAVES, "identity", "ignores")


def specs(kind: str, parts: st.SearchStrategy[tuple[Spec, ...]], ways: int = 1) -> st.SearchStrategy[Spec]:
    return st.builds(Spec, st.just(kind), TAKES, GIVES, st.integers(0, ways - 1), parts)


def branches(part: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    one, two = st.tuples(part), st.tuples(part, part)
    return st.one_of(
        specs("sequence", st.lists(part, min_size=1, max_size=3).map(tuple)),
        specs("residual", one),
        specs("repeated", one, 3),
        specs("parallel", two),
        specs("detour", one, 2),
        specs("no_grad", one),
        specs("unused", two),
        specs("writes_output", one, len(WRITES)),
    )


lends = specs("lends", st.tuples(specs("writes", st.just(()), len(WRITES))), 2)
leaf_specs = st.sampled_from((*LEAVES, "lends", "lends")).flatmap(
    lambda kind: lends if kind == "lends" else specs(kind, st.just(()))
)
TREES = branches(st.recursive(leaf_specs, branches, max_leaves=5))


@dataclasses.dataclass(frozen=True)
class Program:
    """A tree and its input: ``wants`` says which of the two float tensors require a gradient."""

    tree: Spec
    wants: tuple[bool, bool]
    seed: int

    def model(self, inplace: bool = True) -> Block:
        torch.manual_seed(self.seed)
        return Block(self.tree, inplace).double()

    def input(self) -> State:
        draw = torch.Generator().manual_seed(self.seed)
        x, y = (torch.randn(3, WIDTH, dtype=torch.float64, generator=draw) for _ in range(2))
        index = torch.randint(0, WIDTH, (3,), generator=draw)
        return x.requires_grad_(self.wants[0]), y.requires_grad_(self.wants[1]), index

    def loss(self, model: nn.Module, state: State) -> tuple[Any, Tensor]:
        torch.manual_seed(self.seed)
        args, kwargs = CALLS[self.tree.takes](*state)
        output = model(*args, **kwargs)
        x, y, _ = PACKS[self.tree.gives][1](output)
        return output, (x * torch.arange(1, WIDTH + 1)).pow(2).sum() + y.sin().sum()


PROGRAMS = st.builds(Program, TREES, st.tuples(st.booleans(), st.booleans()), st.integers(0, 1000))


# ---------------------------------------------------------------- the independent path


class Isolated:
    """One call, cloned in and cloned out: no other use of its tensors reaches in."""

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = mapped(torch.clone, (args, kwargs))
        inner_args, inner_kwargs = mapped(torch.clone, given)
        self.output = mapped(torch.clone, forward(*inner_args, **inner_kwargs))
        self.leaves = leaves_of(given), leaves_of(self.output)
        self.grads: tuple[list[Tensor | None], list[Tensor | None]] = ([], [])

    def differentiable(self) -> list[Tensor]:
        return [leaf for leaves in self.leaves for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def take(self, found: dict[int, Tensor | None]) -> None:
        self.grads = tuple([found.get(id(leaf)) for leaf in leaves] for leaves in self.leaves)  # type: ignore[assignment]

    @property
    def reached(self) -> bool:
        return any(grad is not None for grad in self.grads[1])


def isolated_calls(program: Program) -> dict[str, list[Isolated]]:
    """Every call of the tree without writes, by path, in the order in which they begin."""
    model = copy.deepcopy(program.model(inplace=False))
    calls: list[tuple[str, list[Isolated]]] = []

    def isolating(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def cloned(*args: Any, **kwargs: Any) -> Any:
            calls.append((path, []))
            box = calls[-1][1]
            box.append(Isolated(forward, args, kwargs))
            return box[0].output

        return cloned

    for path, module in model.named_modules():
        module.forward = isolating(path, module.forward)
    _, loss = program.loss(model, program.input())
    wanted = [leaf for _, (call,) in calls for leaf in call.differentiable()]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
    found: dict[str, list[Isolated]] = {path: [] for path, _ in model.named_modules()}
    for path, (call,) in calls:
        call.take(dict(zip(map(id, wanted), grads, strict=True)))
        found[path].append(call)
    return found


# ---------------------------------------------------------------- the checks


def step(program: Program, model: nn.Module) -> dict[str, Any]:
    state = program.input()
    output, loss = program.loss(model, state)
    if loss.requires_grad:
        loss.backward()
    grads = [parameter.grad for parameter in model.parameters()] + [tensor.grad for tensor in state]
    values = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(output)]
    return {"output": values, "grads": grads, "buffers": list(model.buffers()), "random": torch.get_rng_state()}


def assert_same_bits(program: Program, observed: dict[str, Any], bare: dict[str, Any]) -> None:
    for name in bare:
        if name == "grads" and program.tree.any("passes", "identity"):
            # The documented exception: the last bit of sums at a tensor that a module hands on.
            assert close(observed[name], bare[name], rtol=1e-11), name
        else:
            assert equal(observed[name], bare[name]), name


def check_recording(program: Program) -> None:
    bare, model = step(program, program.model()), program.model()
    with hookline.record(model, "**", ports=PORTS) as recording:
        assert_same_bits(program, step(program, model), bare)
    for path, expected in isolated_calls(program).items():
        calls = recording[path].calls if expected else ()
        assert len(calls) == len(expected), path
        for number, (call, wanted) in enumerate(zip(calls, expected, strict=True)):
            compare(f"call {number} of {path or '(root)'}", call, wanted)


def compare(where: str, call: Any, wanted: Isolated) -> None:
    """Values at all four ports of one call."""
    events = {event.port: event for event in call.events}
    assert same_leaves(leaves_of([call.args, call.kwargs]), wanted.leaves[0]), f"{where}: input"
    assert same_leaves(leaves_of(call.output), wanted.leaves[1]), f"{where}: output"
    for port, grads in zip(("grad_input", "grad_output"), wanted.grads, strict=True):
        if port not in events:
            assert not wanted.reached, f"{where}: {port} has no event, wanted {grads}"
            continue
        value = events[port].value
        found = leaves_of([value.args, value.kwargs] if port == "grad_input" else value)
        assert close(found, grads), f"{where}: {port} is {found}, wanted {grads}"


def same_leaves(found: list[Any], wanted: list[Any]) -> bool:
    if len(found) != len(wanted):
        return False
    pairs = list(zip(found, wanted, strict=True))
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    others = [(a, b) for a, b in pairs if not (isinstance(a, Tensor) and isinstance(b, Tensor))]
    return close(*zip(*tensors, strict=True)) and all(equal(a, b) for a, b in others)


def check_hooks(program: Program) -> None:
    """Backward hooks and forward hooks on every module; the events of a module come in an order of their own."""
    bare, model = step(program, program.model()), program.model()
    seen: dict[str, list[Any]] = {path: [] for path, _ in model.named_modules()}
    handles = []
    for path, module in model.named_modules():
        handles += [
            hookline.register_backward_hook(module, lambda _, *grads, path=path: seen[path].append(grads)),
            hookline.register_forward_hook(module, lambda *_: None),
        ]
    assert_same_bits(program, step(program, model), bare)
    for handle in handles:
        handle.remove()
    for path, calls in isolated_calls(program).items():
        left = [call.grads for call in calls if call.reached]
        # A pass that comes by without a gradient, because a neighbour has one, is an event of Nones.
        found = [grads for grads in seen[path] if any(grad is not None for side in grads for grad in side)]
        assert len(found) == len(left), f"{path}: {len(found)} events of {len(left)}"
        for grads in found:
            place = next((i for i, call in enumerate(left) if all(map(close, grads, call))), None)
            assert place is not None, f"{path}: {grads} belongs to no call; left are {left}"
            del left[place]


# ---------------------------------------------------------------- what such trees have shown before


def takes_and_gives_the_same(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    def function(weight: Tensor, values: Any) -> Any:
        key = "x" if isinstance(values, dict) else 0
        values[key] = change(values[key])
        return values

    return function


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any, Any]] = {
    "dict": (lambda x, y: {"x": x, "y": y}, "x", "y"),
    "list": (lambda x, y: [x, y], 0, 1),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("change", [lambda x: x * 2, lambda x: x.mul_(2)], ids=["new", "in place"])
def test_a_module_that_returns_the_container_it_got_has_gradients_for_every_entry(
    container: str, change: Callable[[Tensor], Tensor]
) -> None:
    make, first, second = CONTAINERS[container]
    module, seen = Computes(takes_and_gives_the_same(change)), []
    hookline.register_backward_hook(module, lambda _, *grads: seen.append(grads))
    x, y = leaf(1.0, -2.0, 3.0), leaf(4.0, 5.0, 6.0)
    values = module(make(x * 1, y * 1))
    (values[first] * vector(1.0, 2.0, 3.0) + values[second] * 5).sum().backward()
    assert close([x.grad, y.grad], [vector(2.0, 4.0, 6.0), vector(5.0, 5.0, 5.0)])
    ((grad_input, grad_output),) = seen
    assert close(grad_output, [vector(1.0, 2.0, 3.0), vector(5.0, 5.0, 5.0)])
    assert close(grad_input, [vector(2.0, 4.0, 6.0), vector(5.0, 5.0, 5.0)])


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_write_into_one_half_in_a_container_that_came_back_is_followed(container: str) -> None:
    make, first, second = CONTAINERS[container]

    def function(weight: Tensor, values: Any) -> Any:
        both = torch.cat([values[first], values[second]]) * 2
        values[first], values[second] = both[:3], both[3:]
        return values

    module, x = Computes(function), leaf()
    hookline.register_backward_hook(module, lambda *_: None)
    values = module(make(x * 1, x * 3))
    values[first].mul_(5)
    (values[first] + values[second]).sum().backward()
    assert close([x.grad], [vector(16.0, 16.0, 16.0)])


@pytest.mark.parametrize("later", [lambda x: 0, torch.sin, torch.exp], ids=["nothing", "sin", "exp"])
@pytest.mark.parametrize("module", ["sum", "three", "lstm cell"])
def test_one_tensor_as_two_arguments_of_a_call_gets_its_gradient_to_the_bit(
    module: str, later: Callable[[Tensor], Any]
) -> None:
    def run(observed: bool, seed: int) -> Tensor | None:
        torch.manual_seed(seed)
        called = {
            "sum": lambda: Computes(lambda weight, a, b: a * 2 + b * 3),
            "three": lambda: Computes(lambda weight, a, b: a * 2 + b * 3 + a * 5),
            "lstm cell": lambda: nn.LSTMCell(WIDTH, WIDTH).double(),
        }[module]()
        if observed:
            hookline.register_backward_hook(called, lambda *_: None)
        x = torch.randn(8, WIDTH, dtype=torch.float64, requires_grad=True)
        y = called(x, (x.detach(), x))[0] if module == "lstm cell" else called(x, x)
        (y + later(x)).pow(2).sum().backward()
        return x.grad

    assert all(equal(run(True, seed), run(False, seed)) for seed in range(5))


# ---------------------------------------------------------------- the properties


def many(number: int) -> settings:
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),  # explaining takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.mark.parametrize("share", range(3))
@many(100)
@given(PROGRAMS)
def test_a_recording_of_a_random_tree_has_the_value_and_gradient_of_every_call(share: int, program: Program) -> None:
    check_recording(program)


@pytest.mark.parametrize("share", range(3))
@many(100)
@given(PROGRAMS)
def test_hooks_on_a_random_tree_see_the_gradients_of_every_call(share: int, program: Program) -> None:
    check_hooks(program)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(10, 20))
@many(500)
@given(PROGRAMS)
def test_many_more_random_trees(share: int, program: Program) -> None:
    check_recording(program)
    check_hooks(program)
