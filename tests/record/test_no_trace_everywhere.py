"""No trace on the model or on torch after failures, generators, several recorders, and models that change meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import io
import itertools
import pickle
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.nn.utils import fusion, parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import hookline
from hookline.errors import HooklineError
from hookline.sites import PORTS

from ..threads import in_threads

# ---------------------------------------------------------------- what there is to see


class Same:
    """An object as such: equal to itself alone."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self.thing).__name__} {id(self.thing):x}>"


class Trace(dict[str, Any]):
    """What is found under which name; a comparison that fails says where."""

    def differences(self, other: Trace) -> dict[str, Any]:
        keys = [*self, *(key for key in other if key not in self)]
        return {key: (self.get(key), other.get(key)) for key in keys if self.get(key) != other.get(key)}


def trace_of(model: nn.Module) -> Trace:
    """Everything by which a hook could be noticed, on the model and on torch; two are equal for the same objects."""
    return Trace(torchs_own() | _trace(model, Same))


def form_of(model: nn.Module) -> Trace:
    """The same of the model alone, and equal for models that are made alike."""
    return _trace(model, lambda thing: _lineage(thing) if isinstance(thing, type) else type(thing).__qualname__)


def _trace(model: nn.Module, look: Callable[[Any], Any]) -> Trace:
    found = Trace()
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"{path} class"] = look(type(module))
        for key, value in vars(module).items():
            found[f"{path} .{key}"] = _seen(value, look)
        found[f"{path} keys"] = list(vars(module))
        found[f"{path} forward"] = look(getattr(module.forward, "__func__", module.forward))
        for name, tensor in itertools.chain(
            module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        ):
            found[f"{path} .{name} tensor"] = (type(tensor), list(tensor.__dict__), tensor.requires_grad)
            for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                found[f"{path} .{name}{table}"] = _seen(getattr(tensor, table), look)
        ours = [name for name in _everything_about(module) if "hookline" in name.lower()]
        assert not ours, f"{path or '(root)'} carries {ours}"
    return found


def _seen(value: Any, look: Callable[[Any], Any]) -> Any:
    """Tables are opened, everything else is looked at as a whole."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        numbered = look is Same or not all(isinstance(key, int) for key, _ in items)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key if numbered else None, look(item)) for key, item in items]
    return value if isinstance(value, (bool, int, str)) else look(value)


def _lineage(cls: type) -> list[str]:
    return [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]


def _everything_about(module: nn.Module) -> Iterator[str]:
    for cls in type(module).__mro__:
        yield from cls.__dict__
        yield cls.__module__
    yield type(type(module)).__module__
    for name, value in vars(module).items():
        yield name
        for hook in value.values() if isinstance(value, dict) and name.endswith("hooks") else ():
            yield f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"
    for tensor in module.parameters(recurse=False):
        for table in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
            yield from (hook.__module__ for hook in (table or {}).values())


PATCHABLE: tuple[Any, ...] = (
    functional,
    torch,
    torch.Tensor,
    torch.autograd,
    torch.autograd.Function,
    nn.Module,
    nn.Linear,
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    torch.utils.checkpoint,
)


def torchs_own() -> dict[str, Any]:
    """The functions of torch that a hook library may replace, and the hooks for all modules."""
    found: dict[str, Any] = {
        f"{place.__name__}.{name}": Same(value)
        for place in PATCHABLE
        for name, value in vars(place).items()
        if callable(value) or isinstance(value, (staticmethod, classmethod, property))
    }
    for name, table in vars(torch_module).items():
        if name.startswith("_global_") and isinstance(table, dict):
            found[name] = list(table)
    return found


@contextlib.contextmanager
def no_trace(*models: nn.Module) -> Iterator[None]:
    """Nothing can be seen afterwards that could not be seen before."""
    before = [trace_of(model) for model in models]
    yield
    for model, trace in zip(models, before, strict=True):
        assert trace_of(model).differences(trace) == {}


# ---------------------------------------------------------------- a model, and what it computes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.act = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.act(self.norm(self.lin(x))) * scale


class Net(nn.Module):
    """A buffer that changes, random numbers, an in-place operation, two calls of a module, a weight used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.drop, self.tail = Block(), nn.Dropout(0.5), nn.Linear(4, 2)
        self.extras = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.block(self.block(x), scale=2.0))
        x = functional.linear(x, self.tail.weight, self.tail.bias) + self.tail(x)
        for extra in self.extras:
            x = extra(x)
        return x


class OtherBlock(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale) - 1


def net() -> Net:
    torch.manual_seed(1)
    return Net()


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def inputs(model: nn.Module) -> Tensor:
    first = next(tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point())
    made = torch.linspace(-1, 1, 12).view(3, 4)
    return made.to(dtype=first.dtype, device=first.device).requires_grad_()


def computes(model: nn.Module) -> list[Tensor]:
    """Output, gradients and buffers of one training step."""
    torch.manual_seed(2)
    x = inputs(model)
    out = model(x)
    wanted = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    grads = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
    kept = [out.detach(), *(torch.zeros(0) if grad is None else grad for grad in grads), *model.buffers()]
    return [tensor.clone() for tensor in kept]


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and (a.is_meta or torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def alive(*refs: weakref.ref[Any]) -> list[Any]:
    return [ref() for ref in refs if ref() is not None]


def refs_to(model: nn.Module) -> list[weakref.ref[Any]]:
    things: list[Any] = [*model.modules(), *model.parameters()]
    return list(map(weakref.ref, things))


def test_the_trace_sees_what_hooks_leave() -> None:
    """Each of these is what a careless library does; the helper above would notice."""
    model = net()
    before = trace_of(model)
    handle = model.tail.register_forward_hook(print)
    assert list(trace_of(model).differences(before)) == ["tail ._forward_hooks"]
    handle.remove()
    handle = model.tail.weight.register_hook(print)
    assert list(trace_of(model).differences(before)) == ["tail .weight_backward_hooks"]
    handle.remove()
    model.tail.weight._backward_hooks = None
    original, functional.linear = functional.linear, lambda *args: original(*args)
    assert list(trace_of(model).differences(before)) == ["torch.nn.functional.linear"]
    functional.linear = original
    model.tail.forward = model.tail.forward
    assert set(trace_of(model).differences(before)) == {"tail .forward", "tail keys"}
    del model.tail.forward
    with hookline.record(model), pytest.raises(AssertionError, match="carries"):
        trace_of(model)
    assert trace_of(model).differences(before) == {}


# ---------------------------------------------------------------- exceptions


class Stop(Exception):
    pass


class Fuse(torch.autograd.Function):
    """Raises in the forward or in the backward, as an operation of the model's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str, error: type[BaseException]) -> Tensor:
        ctx.where, ctx.error = where, error
        if where == "forward":
            raise error("mine")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.where == "backward":
            raise ctx.error("mine")
        return grad, None, None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.error: type[BaseException] | None = None
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.error is None else Fuse.apply(x, self.where, self.error)  # type: ignore[no-any-return]


ERRORS = [Stop, KeyboardInterrupt, SystemExit, GeneratorExit, RecursionError, MemoryError]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_after_an_exception_of_the_model_itself(
    error: type[BaseException], where: str, caught: str, without_gc: None
) -> None:
    model = net()
    model.extras.append(fuse := Fused())
    twin = copy.deepcopy(model)
    with no_trace(model):
        with contextlib.ExitStack() as outside:
            outside.enter_context(pytest.raises(error) if caught == "outside" else contextlib.nullcontext())
            rec = outside.enter_context(hookline.record(model, ports=PORTS))
            fuse.error, fuse.where = error, where
            with pytest.raises(error) if caught == "inside" else contextlib.nullcontext():
                computes(model)
            fuse.error = None
            first = len(rec)
            assert same_bits(computes(model)[:1], computes(copy.deepcopy(model))[:1]) and len(rec) > first
        fuse.error, fuse.where = None, ""
    with contextlib.suppress(error):
        twin.extras[0].error, twin.extras[0].where = error, where
        computes(twin)
    twin.extras[0].error = None
    if caught == "inside":
        computes(twin)
    assert same_bits(computes(model), computes(twin))
    gone = refs_to(model)
    del model, fuse, outside
    assert alive(*gone) == []


def fail_at(number: int, error: type[BaseException]) -> Callable[[Tensor], Tensor]:
    count = itertools.count()

    def reduce(value: Tensor) -> Tensor:
        if next(count) == number:
            raise error("mine")
        return value.sum()

    return reduce


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("number", [0, 3])
def test_after_an_exception_in_reduce(error: type[BaseException], port: str, number: int, without_gc: None) -> None:
    model = net()
    twin = copy.deepcopy(model)
    with no_trace(model):
        with hookline.record(model, ports=port, reduce=fail_at(number, error)) as rec:
            with pytest.raises(error, match="mine"):
                computes(model)
            assert len(rec) >= number
            model.load_state_dict(twin.state_dict())
            assert same_bits(computes(model), computes(twin)), "goes on after the failure"
        assert len(rec) > number
    model.load_state_dict(twin.state_dict())
    assert same_bits(computes(model), computes(twin))
    gone = refs_to(model)
    del model
    assert alive(*gone) == []


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("port", PORTS)
def test_after_an_exception_in_a_change(error: type[BaseException], port: str, without_gc: None) -> None:
    model = net()

    def change(value: Any) -> Any:
        raise error("mine")

    twin = copy.deepcopy(model)
    with no_trace(model), pytest.raises(error, match="mine"), contextlib.ExitStack() as stack:
        stack.enter_context(hookline.record(model, ports=PORTS))
        stack.enter_context(hookline.edit(model, {f"block.lin:{port}": change}))
        computes(model)
    model.load_state_dict(twin.state_dict())
    assert same_bits(computes(model), computes(twin))
    gone = refs_to(model)
    del model
    assert alive(*gone) == []


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward"])
@pytest.mark.parametrize("whose", ["ours", "stock"])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_after_an_exception_in_a_hook_of_the_user_which_stays(
    kind: str, whose: str, error: type[BaseException]
) -> None:
    model = net()

    def fail(*_: Any) -> None:
        raise error("mine")

    model.block.act = nn.ReLU()  # PyTorch's own backward hooks allow no in-place operation
    model.block.register_full_backward_hook(note_nothing).remove()  # and leave a mark
    with no_trace(model):
        name = (
            f"register_{kind}_hook" if whose == "ours" else f"register_{'full_' if 'back' in kind else ''}{kind}_hook"
        )
        register = getattr(hookline, name) if whose == "ours" else getattr(nn.Module, name)
        handle = register(model.block, fail)
        with pytest.raises(error, match="mine"), hookline.record(model, ports=PORTS):
            computes(model)
        with pytest.raises(error, match="mine"):
            computes(model)
        handle.remove()
        computes(model)


def test_after_a_failure_to_install() -> None:
    model = net()

    class Sealed(nn.Module):
        def __init_subclass__(cls) -> None:
            raise TypeError("sealed")

    model.extras.append(torch.jit.script(nn.ReLU()))
    with no_trace(model):
        with pytest.raises(HooklineError), hookline.record(model, ["block.**", "extras.0"], PORTS):
            pass
        with pytest.raises(HooklineError):
            hookline.register_forward_hook(model.extras[0], print)


# ---------------------------------------------------------------- generators and coroutines


def training(model: nn.Module, recordings: list[Any], steps: int = 3) -> Generator[int, None, None]:
    with hookline.record(model, ports=PORTS) as rec:
        recordings.append(rec)
        for step in range(steps):
            computes(model)
            yield step


def exhaust(generator: Any) -> None:
    assert list(generator) == [1, 2]


def throw(generator: Any) -> None:
    with pytest.raises(Stop):
        generator.throw(Stop)


def close_in_a_thread(generator: Any) -> None:
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()


ENDINGS: dict[str, Callable[[Any], None]] = {
    "closed": lambda generator: generator.close(),
    "exhausted": exhaust,
    "thrown into": throw,
    "dropped": lambda generator: None,
    "closed in another thread": close_in_a_thread,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_generator_with_a_recorder_inside(ending: str, without_gc: None) -> None:
    model = net()
    twin, recordings = copy.deepcopy(model), []
    with no_trace(model):
        generator = training(model, recordings)
        next(generator)
        assert type(model) is not Net
        ENDINGS[ending](generator)
        del generator
    for _ in recordings[0].steps:
        computes(twin)
    assert same_bits(computes(model), computes(twin))
    assert len(recordings[0].steps) == (3 if ending == "exhausted" else 1)
    gone = refs_to(model)
    del model
    assert alive(*gone) == []


def test_a_generator_that_is_in_a_cycle_ends_with_the_collector() -> None:
    model = net()
    with no_trace(model):
        generator = training(model, recordings := [])
        next(generator)
        recordings.append(generator)
        del generator, recordings
        gc.collect()


def test_a_generator_that_was_never_started_installs_nothing() -> None:
    model = net()
    with no_trace(model):
        generator = training(model, [])
        assert type(model) is Net
        generator.close()


def test_generators_that_take_turns_and_end_in_another_order() -> None:
    model = net()
    with no_trace(model):
        recordings: list[Any] = []
        generators = [training(model, recordings) for _ in range(3)]
        for generator in generators:
            next(generator)
        generators[0].close()
        next(generators[2])
        throw(generators[1])
        generators[2].close()
    assert [len(rec.steps) for rec in recordings] == [3, 3, 2]


def test_a_context_manager_made_of_a_generator() -> None:
    model = net()

    @contextlib.contextmanager
    def observed() -> Iterator[Any]:
        with hookline.record(model, ports=PORTS) as rec:
            yield rec

    with no_trace(model):
        with observed() as rec:
            computes(model)
        with pytest.raises(Stop), observed():
            raise Stop
    assert len(rec) > 0


@pytest.mark.parametrize("ending", ["finishes", "is cancelled", "raises", "is closed without being awaited to its end"])
def test_a_coroutine_with_a_recorder_inside(ending: str) -> None:
    model = net()

    async def observe(pause: Callable[[], Any]) -> None:
        with hookline.record(model, ports=PORTS):
            computes(model)
            await pause()
            if ending == "raises":
                raise Stop

    async def main() -> None:
        task = asyncio.ensure_future(observe(lambda: asyncio.sleep(0 if ending != "is cancelled" else 60)))
        await asyncio.sleep(0)
        if ending == "is cancelled":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @types.coroutine
    def once() -> Iterator[None]:
        yield

    with no_trace(model):
        if ending.startswith("is closed"):
            coroutine = observe(once)
            coroutine.send(None)
            assert type(model) is not Net
            coroutine.close()
        else:
            asyncio.run(main())


def test_an_asynchronous_generator_that_is_left() -> None:
    model = net()

    async def steps() -> AsyncIterator[int]:
        with hookline.record(model, ports=PORTS):
            for step in range(3):
                computes(model)
                yield step

    async def main() -> None:
        generator = steps()
        async for _ in generator:
            break
        await generator.aclose()  # type: ignore[attr-defined]

    with no_trace(model):
        asyncio.run(main())


# ---------------------------------------------------------------- recorders that are never left


DROPPED = """
import gc
import hookline
from torch import nn
from torch.nn import functional

def own():
    return {**vars(functional)}, nn.TransformerEncoder.forward, nn.MultiheadAttention.forward

before = own()
model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
hookline.record(model, ports=("output", "grad_input")).__enter__()
hookline.register_forward_hook(model, print)
assert own() != before
del model
gc.collect()
assert own() == before
"""


def test_a_recorder_that_is_dropped_with_its_model_gives_torch_back() -> None:
    """In a process of its own: tests before this one may have left hooked models, for which torch stays wrapped."""
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_model_that_is_dropped_inside_the_block(without_gc: None) -> None:
    model = net()
    before = torchs_own()
    with hookline.record(model, ports=PORTS) as rec:
        computes(model)
        del model
    assert torchs_own() == before and len(rec) > 0


@pytest.mark.parametrize("when", ["before the block ends", "after"])
def test_a_graph_that_outlives_the_block(when: str, without_gc: None) -> None:
    model = net()
    twin = copy.deepcopy(model)
    with no_trace(model):
        with hookline.record(model, ports=PORTS):
            torch.manual_seed(2)
            loss = model(inputs(model)).square().sum()
            if when.startswith("before"):
                loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        torch.manual_seed(2)
        twin(inputs(twin)).square().sum().backward()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)
            parameter.grad = None
    gone = refs_to(model)[: len(list(model.modules()))]
    del model, loss
    assert alive(*gone) == []


# ---------------------------------------------------------------- several at once


class Opened:
    """One thing that stands at the model, and how often it was called."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self.calls = 0
        self.recording: Any = None
        if kind.startswith("record"):
            pattern = "**" if kind == "record all" else ["block.*", "tail"]
            self.context: Any = hookline.record(model, pattern, ("output",) if kind == "record all" else PORTS)
            self.recording = self.context.__enter__()
        elif kind == "edit":
            self.context = hookline.edit(model, {"block.*:output": self.count, "tail:grad_input": self.count})
            self.context.__enter__()
        else:
            self.context = hookline.register_backward_hook(model.block, self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    @property
    def seen(self) -> int:
        return self.calls if self.recording is None else len(self.recording)

    def close(self) -> None:
        self.context.__exit__(None, None, None)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_what_stands_at_overlapping_places_may_end_in_every_order(order: tuple[int, ...], without_gc: None) -> None:
    model = net()
    twin = copy.deepcopy(model)
    with no_trace(model):
        opened = [Opened(kind, model) for kind in ("record all", "edit", "record some", "hook")]
        for closing in order:
            assert same_bits(computes(model), computes(twin))
            before = [one.seen for one in opened]
            opened[closing].close()
            assert all(before)
            assert same_bits(computes(model), computes(twin))
            still = [one.seen > count for one, count in zip(opened, before, strict=True)]
            done = order[: order.index(closing) + 1]
            assert still == [number not in done for number in range(4)]
    gone = refs_to(model)
    del model, opened
    assert alive(*gone) == []


def test_a_recorder_of_a_part_and_one_of_the_whole_in_every_nesting() -> None:
    model = net()
    with no_trace(model):
        for first, second in itertools.permutations([model, model.block]):
            one, two = hookline.record(first, ports=PORTS), hookline.record(second, ports=PORTS)
            one.__enter__(), two.__enter__()
            computes(model)
            one.close()
            assert type(model.block.lin) is not nn.Linear
            two.close()


def test_the_failure_of_one_recorder_leaves_the_other_at_work() -> None:
    model = net()
    with no_trace(model), hookline.record(model, "block", PORTS) as outer:
        with pytest.raises(Stop), hookline.record(model, ports=PORTS, reduce=fail_at(2, Stop)):
            computes(model)
        before = len(outer)
        computes(model)
        assert len(outer) == before + 8
    assert type(model.block) is Block


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_record_one_model_at_overlapping_places(fails: bool) -> None:
    model = net()
    model.eval()
    twin, lengths = copy.deepcopy(model), []
    expected = computes(twin)

    def task(kind: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(6):
                opened = Opened(kind, model)
                try:
                    assert same_bits(computes(model), expected)
                    if fails:
                        raise Stop
                except Stop:
                    pass
                finally:
                    opened.close()
                lengths.append(opened.seen)

        return run

    with no_trace(model):
        in_threads(*map(task, ("record all", "record some", "edit", "hook")))
    assert len(lengths) == 24 and all(lengths)
    assert same_bits(computes(model), expected)


def test_a_recorder_that_is_left_in_another_thread_than_it_was_entered() -> None:
    model = net()
    recorder = hookline.record(model, ports=PORTS)
    with no_trace(model):
        in_threads(recorder.__enter__)
        computes(model)
        in_threads(recorder.close)


def test_threads_with_models_of_one_class_do_not_meet() -> None:
    models = [Net() for _ in range(4)]

    def task(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            for _ in range(10):
                with hookline.record(model, "block.lin") as rec:
                    model(inputs(model))
                assert len(rec) == 2

        return run

    with no_trace(*models):
        in_threads(*map(task, models))


# ---------------------------------------------------------------- copies and files


def loaded(save: Callable[[Any, Any], None]) -> Callable[[nn.Module], nn.Module]:
    def through_a_file(model: nn.Module) -> nn.Module:
        file = io.BytesIO()
        save(model, file)
        file.seek(0)
        return pickle.load(file) if save is pickle.dump else torch.load(file, weights_only=False)  # type: ignore[no-any-return]

    return through_a_file


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": loaded(pickle.dump),
    "torch.save": loaded(torch.save),
    "AveragedModel": lambda model: AveragedModel(model).module,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("when", ["between calls", "in the forward", "in the backward"])
def test_a_copy_that_is_made_while_recorders_are_attached(how: str, when: str, without_gc: None) -> None:
    model = net()
    plain, twins, root = COPIES[how](model), [], weakref.ref(model)

    def take(module: nn.Module, *_: Any) -> None:
        twins.append(COPIES[how](root()))

    with no_trace(model), contextlib.ExitStack() as stack:
        rec = stack.enter_context(hookline.record(model, ports=PORTS))
        with hookline.edit(model, {"tail": lambda value: None}):
            if when == "between calls":
                take(model)
            else:
                register = hookline.register_forward_hook if "forward" in when else hookline.register_backward_hook
                with register(model.drop, take):
                    computes(model)
            before, twin = len(rec), twins[0]
            assert form_of(twin).differences(form_of(plain)) == {}
            twin.load_state_dict(plain.state_dict())
            assert same_bits(computes(twin), computes(plain)) and len(rec) == before
    assert form_of(twin).differences(form_of(plain)) == {}
    gone = refs_to(model)
    del model
    assert alive(*gone) == []


def test_a_file_of_the_state_is_the_same_with_recorders_attached_and_of_the_model_afterwards() -> None:
    model = net()

    def saved(thing: Any) -> tuple[bytes, bytes]:
        torch.save(thing, file := io.BytesIO())
        return pickle.dumps(thing), file.getvalue()

    before = saved(model), saved(model.state_dict())
    with hookline.record(model, ports=PORTS), hookline.edit(model, {"tail": lambda value: None}):
        model.eval()(inputs(model))
        model.train()
        assert saved(model.state_dict()) == before[1]
        assert not any(b"hookline" in data for data in saved(model))
    assert (saved(model), saved(model.state_dict())) == before


# ---------------------------------------------------------------- models that change meanwhile


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def replaced(model: Net) -> None:
    torch.manual_seed(5)
    model.block = OtherBlock()


def with_assigned_state(model: Net) -> None:
    state = {name: value.clone() + 0.5 if value.is_floating_point() else value for name, value in _state(model)}
    model.load_state_dict(state, assign=True)


def with_loaded_state(model: Net) -> None:
    model.load_state_dict(
        {name: value * 0 + 0.25 if value.is_floating_point() else value for name, value in _state(model)}
    )


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.state_dict().items())


def with_a_patched_forward(model: Net) -> None:
    old = model.tail.forward
    model.tail.forward = lambda x: old(x) + 1


def patched_and_back(model: Net) -> None:
    with_a_patched_forward(model)
    computes(model)
    del model.tail.forward


def of_another_class(model: Net) -> None:
    model.block.__class__ = OtherBlock


def with_swapped_modules(model: Net) -> None:
    model.block.lin, model.block.norm, model.block.extra = model.block.lin, model.block.norm, model.tail


def with_a_tied_weight(model: Net) -> None:
    model.extras.append(nn.Linear(2, 2))
    model.extras.append(nn.Linear(2, 2))
    model.extras[1].weight = model.extras[0].weight


def pruned(model: Net) -> None:
    prune.l1_unstructured(model.block.lin, "weight", 0.5)


def pruned_for_good(model: Net) -> None:
    pruned(model)
    computes(model)
    prune.remove(model.block.lin, "weight")


def fused(model: Net) -> None:
    model.block.eval()
    model.block.lin = fusion.fuse_linear_bn_eval(model.block.lin, model.block.norm)
    model.block.norm = nn.Identity()


def with_more_of_everything(model: Net) -> None:
    model.tail.register_buffer("seen", torch.ones(1))
    model.tail.register_parameter("gain", nn.Parameter(torch.ones(1)))
    model.tail.note = {"a": 1}
    model.tail.child = nn.ReLU()
    del model.tail.child


def called_with_other_parameters(model: Net) -> None:
    state = {name: parameter * 2 for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, state, (inputs(model),))


def hooked_by_others(model: Net) -> None:
    model.tail.register_forward_hook(note_nothing)
    model.tail.register_forward_pre_hook(note_nothing, prepend=True)
    model.block.register_full_backward_pre_hook(note_nothing)
    model.tail.weight.register_hook(keep_gradient)


def note_nothing(*_: Any) -> None: ...


def keep_gradient(grad: Tensor) -> None: ...


def without_a_module(model: Net) -> None:
    del model.extras
    model.extras = ()


CHANGES: dict[str, Callable[[Net], Any]] = {
    "nothing": lambda model: None,
    "to float64": lambda model: model.double(),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "to meta": lambda model: model.to("meta"),
    "to memory of its own": lambda model: model.to_empty(device="cpu").load_state_dict(Net().state_dict()),
    "to shared memory": lambda model: model.share_memory(),
    "frozen": lambda model: model.requires_grad_(False),
    "evaluation": lambda model: model.eval(),
    "loaded": with_loaded_state,
    "loaded by assignment": with_assigned_state,
    "another parameter": lambda model: setattr(model.tail, "weight", nn.Parameter(torch.ones(2, 4))),
    "another module": replaced,
    "a module less": without_a_module,
    "a module more": lambda model: model.extras.append(nn.Tanh()),
    "a module under a second name": with_swapped_modules,
    "a module more, in a list": lambda model: model.extras.extend([nn.Tanh(), Doubled()]),
    "tied weights": with_a_tied_weight,
    "a parametrization": lambda model: parametrize.register_parametrization(model.tail, "weight", Doubled()),
    "two parametrizations": lambda model: [
        parametrize.register_parametrization(model.tail, "weight", Doubled()) for _ in range(2)
    ],
    "weight norm": lambda model: parametrizations.weight_norm(model.block.lin),
    "spectral norm": lambda model: parametrizations.spectral_norm(model.block.lin),
    "pruned": pruned,
    "pruned for good": pruned_for_good,
    "fused": fused,
    "a patched forward": with_a_patched_forward,
    "a patched forward, and back": patched_and_back,
    "another class": of_another_class,
    "attributes": with_more_of_everything,
    "called with other parameters": called_with_other_parameters,
    "hooked by others": hooked_by_others,
}


def changed(model: Net, change: str) -> None:
    torch.manual_seed(3)
    CHANGES[change](model)


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_while_recorders_are_attached_is_as_if_they_were_not(
    change: str, without_gc: None
) -> None:
    changed(warm := net(), change)  # torch imports modules on the way, which keeps the first model alive
    computes(warm)
    model = net()
    twin, parts = copy.deepcopy(model), dict(model.named_modules())
    with hookline.record(model, ports=PORTS) as rec, hookline.edit(model, {"tail": lambda value: None}):
        assert same_bits(computes(model), computes(twin))
        changed(model, change)
        changed(twin, change)
        assert same_bits(computes(model), computes(twin)), "while attached"
    assert form_of(model).differences(form_of(twin)) == {}
    assert same_bits(computes(model), computes(twin)), "afterwards"
    for path, part in parts.items():
        assert not any("hookline" in name for name in (*vars(part), *vars(type(part)))), path
    if change != "pruned":  # its weight is part of a graph, which no copy allows
        again = copy.deepcopy(model)
        assert form_of(again).differences(form_of(copy.deepcopy(twin))) == {}
        del again
    assert len(rec) > 0
    gone, wanted = refs_to(model), refs_to(twin)
    del model, twin, parts, part
    assert len(alive(*gone)) == len(alive(*wanted)), "freed as a model that nobody has looked at"


@pytest.mark.parametrize("change", ["another module", "a module less", "another parameter"])
def test_what_a_change_takes_out_is_freed_at_once_and_clean(change: str, without_gc: None) -> None:
    model = net()
    model.extras.append(nn.Tanh())
    kept = {"another module": model.block, "a module less": model.extras[0], "another parameter": model.tail.weight}
    taken = kept.pop(change)
    kept.clear()
    gone = weakref.ref(taken)
    with hookline.record(model, "**", PORTS):
        computes(model)
        changed(model, change)
        del taken
        assert gone() is None, "while attached"


def test_a_module_that_was_taken_out_is_clean_and_may_be_used_elsewhere() -> None:
    model = net()
    block = model.block
    with no_trace(block):
        with hookline.record(model, ports=PORTS) as rec:
            replaced(model)
            before = len(rec)
            computes(nn.Sequential(block))
            assert len(rec) > before, "it is still observed until the block ends"
        computes(nn.Sequential(block))


def test_a_module_that_came_in_meanwhile_is_not_touched() -> None:
    model = net()
    new = nn.Tanh()
    with no_trace(new), hookline.record(model, ports=PORTS) as rec:
        model.extras.append(new)
        computes(model)
        assert type(new) is nn.Tanh and vars(new).keys() == vars(nn.Tanh()).keys()
    assert not any("Tanh" in str(event) for event in rec)


def test_a_lazy_module_gets_its_shape_and_class_while_recorders_are_attached() -> None:
    def lazy() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU(inplace=True))

    def compute(model: nn.Module) -> Tensor:
        torch.manual_seed(4)
        out: Tensor = model(torch.ones(2, 4))
        out.sum().backward()
        return out.detach()

    model, twin = lazy(), lazy()
    with hookline.record(model, ports=PORTS) as rec:
        assert torch.equal(compute(model), compute(twin))
    assert len(rec) > 0 and [type(module) for module in model] == [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert form_of(model).differences(form_of(twin)) == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("inplace", [False, True])
def test_dynamic_quantization_while_recorders_are_attached(inplace: bool) -> None:
    model = net()

    def quantized(model: nn.Module) -> nn.Module:
        return torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, inplace=inplace)  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))  # type: ignore[assignment]
    twin, x = copy.deepcopy(model), torch.linspace(-1, 1, 8).view(2, 4)
    with hookline.record(model):
        made, wanted = quantized(model), quantized(twin)
        assert (made is model) == inplace
        assert torch.equal(made(x), wanted(x)) and torch.equal(model(x), twin(x))
    assert type(made[0]) is type(wanted[0]) is torch.ao.nn.quantized.dynamic.Linear
    for one, other in ((made, wanted), (model, twin)):
        assert form_of(one).differences(form_of(other)) == {}
        assert torch.equal(one(x), other(x))


def test_a_fused_encoder_is_fused_again_after_the_recorder() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, calls = torch.randn(2, 3, 8), []
    encoder.requires_grad_(False)
    with no_trace(encoder):
        before = encoder(x)
        with pytest.raises(Stop), hookline.record(encoder, ports=PORTS):
            encoder(x)
            raise Stop
    original = functional.gelu
    functional.relu, relu = lambda *args, **kwargs: calls.append(1), functional.relu
    try:
        assert torch.equal(encoder(x), before) and calls == [], "the kernel computes it, not the sub-modules"
    finally:
        functional.relu = relu
    assert functional.gelu is original


def test_models_that_come_change_and_go_leave_nothing_behind() -> None:
    def once(change: str) -> None:
        model = net()
        with hookline.record(model, ports=PORTS), hookline.edit(model, {"tail": lambda value: None}):
            changed(model, change)
            computes(model)

    changes = ["another module", "loaded by assignment", "weight norm", "another class", "a patched forward"]
    for change in changes:
        once(change)
    growth = []
    for _ in range(3):  # what is left behind is there each time; what other tests have begun comes and goes
        gc.collect()  # a class is always in a cycle of its own, and goes with the first collection
        before = len(gc.get_objects())
        for change in changes * 10:
            once(change)
        gc.collect()
        growth.append(len(gc.get_objects()) - before)
    assert min(growth) < 50, growth


def counting(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return counted


def test_a_function_of_torch_that_somebody_else_wraps_inside_the_block_and_gives_back() -> None:
    model, calls = net(), []
    with no_trace(model), hookline.record(model, ports=PORTS):
        inside = functional.linear
        functional.linear = counting(inside, calls)
        computes(model)
        functional.linear = inside
    assert len(calls) == 4


def test_a_function_of_torch_that_somebody_else_wraps_for_longer_stays_theirs() -> None:
    model, twin, calls, original = net(), net(), [], functional.linear
    expected = [computes(twin) for _ in range(3)]
    try:
        with hookline.record(model, ports=PORTS):
            functional.linear = mine = counting(functional.linear, calls)
            assert same_bits(computes(model), expected[0])
        assert functional.linear is mine and same_bits(computes(model), expected[1])
        with hookline.record(model, ports=PORTS) as rec:
            assert same_bits(computes(model), expected[2]) and len(rec["tail"].calls) == 2
        assert functional.linear is mine and len(calls) == 12
    finally:
        functional.linear = original


# ---------------------------------------------------------------- other people's hooks


OTHERS: dict[str, Callable[[Net, Callable[..., Any]], Any]] = {
    "forward pre": lambda model, hook: model.tail.register_forward_pre_hook(hook),
    "forward": lambda model, hook: model.tail.register_forward_hook(hook),
    "backward pre": lambda model, hook: model.tail.register_full_backward_pre_hook(hook),
    "backward": lambda model, hook: model.tail.register_full_backward_hook(hook),
    "state dict pre": lambda model, hook: model.tail.register_state_dict_pre_hook(hook),
    "state dict": lambda model, hook: model.tail.register_state_dict_post_hook(hook),
    "load pre": lambda model, hook: model.tail.register_load_state_dict_pre_hook(hook),
    "load": lambda model, hook: model.tail.register_load_state_dict_post_hook(hook),
    "parameter": lambda model, hook: model.tail.weight.register_hook(hook),
    "accumulated": lambda model, hook: model.tail.weight.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("ends", ["well", "with an exception"])
def test_other_peoples_hooks_come_go_and_fire_in_order_around_a_recorder(kind: str, ends: str) -> None:
    model = net()
    log: list[str] = []

    def put(name: str) -> Any:
        return OTHERS[kind](model, lambda *_: log.append(name))

    def fire() -> str:
        log.clear()
        model.tail(torch.ones(2, 4, requires_grad=True) * 1).sum().backward()
        model.load_state_dict(model.state_dict())
        return "".join(log)

    gone, _ = put("a"), put("b")
    with pytest.raises(Stop) if ends != "well" else contextlib.nullcontext(), hookline.record(model, ports=PORTS):
        assert fire() == "ab"
        put("c")
        gone.remove()
        brief = put("d")
        assert fire() == "bcd"
        brief.remove()
        if ends != "well":
            raise Stop
    assert fire() == "bc"
    put("e")
    assert fire() == "bce"
    trace_of(model)


def _of_a_metaclass() -> nn.Module:
    return type("Meta", (type,), {})("Made", (nn.Linear,), {})(2, 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), _of_a_metaclass],
    ids=["weight norm", "metaclass"],
)
def test_classes_made_at_run_time_go_with_the_first_collection(make: Callable[[], nn.Module]) -> None:
    gc.collect()
    gc.disable()
    try:
        model = make()
        with hookline.record(model):
            model(torch.ones(1, 2))
        gone = [weakref.ref(thing) for thing in (type(model), type(type(model))) if thing is not type]
        del model
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()
