"""Well-known architectures with every module recorded: the same bits, every site explained, and nothing left."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import random
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookline

from .architectures import TRANSFORMERS, Builder, Case
from .torchvision_models import FULL, TINY, needs_torchvision

PORTS = ("input", "output", "grad_input", "grad_output")
REASON = {torch.no_grad: "under torch.no_grad()", torch.inference_mode: "in torch.inference_mode()"}
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


# ---------------------------------------------------------------- one training step


@dataclasses.dataclass
class Step:
    """What a step leaves; ``warned`` are the warnings of Python code."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    inputs: list[Tensor | None]
    buffers: dict[str, Tensor]
    random: tuple[Tensor, Any, Any]
    warned: set[str]


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def build(builder: Builder, training: bool) -> Case:
    """In evaluation the floating inputs require a gradient as well."""
    seed(0)
    case = builder()
    case.model.train(training)
    if not training:
        for value in tensors_of([case.args, case.inputs]):
            value.requires_grad_(value.is_floating_point())
    return case


def step(case: Case) -> Step:
    seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = case.model(*case.args, **case.inputs)
        loss_of(output).backward()
    return Step(
        [tensor.detach() for tensor in tensors_of(output)],
        {name: parameter.grad for name, parameter in case.model.named_parameters()},
        [tensor.grad for tensor in tensors_of([case.args, case.inputs])],
        dict(case.model.named_buffers()),
        (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()),
        {str(warning.message) for warning in caught},
    )


def loss_of(output: Any) -> Tensor:
    """The model's own loss; where it has none, a mean square of everything that can be differentiated."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    differentiable = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    return torch.stack([(tensor - 0.5).square().mean() for tensor in differentiable]).sum()


def tensors_of(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """All tensors inside containers and plain objects, such as the caches of transformers."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (str, bytes, type, nn.Module)) or callable(value) or id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Mapping):
        children: Iterator[Any] = iter(value.values())
    else:
        children = iter(value if isinstance(value, (tuple, list)) else vars(value).values() if _has(value) else ())
    return [tensor for child in children for tensor in tensors_of(child, seen)]


def _has(value: Any) -> bool:
    return hasattr(value, "__dict__")


def same(a: Any, b: Any) -> bool:
    """The same bits, NaN included."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def different(observed: Step, bare: Step) -> list[str]:
    """Names of what is not the same in two steps."""
    found = [name for name in ("outputs", "inputs", "random") if not same(getattr(observed, name), getattr(bare, name))]
    for kind in ("gradients", "buffers"):
        one, other = getattr(observed, kind), getattr(bare, kind)
        found += [f"{kind}: {name}" for name in one.keys() | other.keys() if not same(one.get(name), other.get(name))]
    return found


# ---------------------------------------------------------------- what PyTorch's own hooks count


@dataclasses.dataclass
class Counted:
    """By path: calls that returned, and outputs at which a gradient arrived."""

    calls: Counter[str]
    arrived: set[str]


def count(case: Case) -> Counted:
    """With stock forward hooks on every module and stock tensor hooks on what they saw."""
    found = Counted(Counter(), set())

    def returned(path: str, output: Any) -> Tensor | None:
        if torch._C._current_graph_task_id() == -1:  # not in a recomputation
            found.calls[path] += 1
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: found.arrived.add(path))
        # A write into a view takes the hook of the view away with its place in the graph.
        is_view = isinstance(output, Tensor) and output.requires_grad and output._is_view()
        return output.clone() if is_view else None

    handles = [
        module.register_forward_hook(lambda *seen, path=path: returned(path, seen[-1]))
        for path, module in case.model.named_modules()
    ]
    step(case)
    for handle in handles:
        handle.remove()
    return found


# ---------------------------------------------------------------- what is left


def belongings(model: nn.Module) -> list[Any]:
    """What a module and its parameters carry, by name."""
    return [
        (path, type(module), sorted(vars(module)), *(len(table) for table in _hook_tables(module)))
        for path, module in model.named_modules()
    ] + [
        (name, type(value), sorted(vars(value)), value._backward_hooks, value._post_accumulate_grad_hooks)
        for name, value in model.named_parameters()
    ]


def _hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    return [value for name, value in sorted(vars(module).items()) if name.endswith("_hooks")]


def of_hookline(model: nn.Module) -> list[str]:
    values = [(path, value) for path, module in model.named_modules() for value in vars(module).values()]
    return [f"{path}: {value!r}" for path, value in values if type(value).__module__.startswith("hookline")]


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# ---------------------------------------------------------------- the checks


def check(case: Case) -> None:
    twin, third = copy.deepcopy(case), copy.deepcopy(case)
    bare = step(twin)
    counted = count(third)
    del third
    with hookline.record(case.model, "**", ports=PORTS) as recording:
        observed = step(case)
    assert different(observed, bare) == []
    assert not (extra := observed.warned - bare.warned), extra
    assert any(grad is not None for grad in bare.gradients.values()) and bare.outputs, "nothing was compared"
    check_coverage(case.model, recording, counted)
    assert belongings(case.model) == belongings(twin.model)
    assert of_hookline(case.model) == []


def check_coverage(model: nn.Module, recording: hookline.Recording, counted: Counted) -> None:
    coverage = recording.coverage
    names = {path: path or "(root)" for path, _ in model.named_modules()}
    assert set(coverage) == {f"{name}:{port}" for name in names.values() for port in PORTS}
    recorded: dict[str, set[Any]] = {site: set() for site in coverage}
    for event in recording:
        if event.leaves() or not event.port.startswith("grad"):  # an event without any gradient counts for nothing
            recorded[f"{names[event.path]}:{event.port}"].add((event.step, event.call))
    for site, fate in coverage.items():
        captured = fate.status == "captured"
        assert captured == bool(recorded[site]) and fate.calls == len(recorded[site]), fate
        assert captured or (fate.status in ("not reached", "bypassed") and fate.reason.strip()), fate
    for path, calls in counted.calls.items():
        fate = coverage[f"{names[path]}:output"]
        assert (fate.status, fate.calls) == ("captured", calls), (fate, calls)
        assert coverage[f"{names[path]}:input"].status == "captured"
    arrived = {path for path in names if coverage[f"{names[path]}:grad_output"].status == "captured"}
    assert arrived >= counted.arrived, counted.arrived - arrived
    assert {path for path in arrived if counted.calls[path]} == counted.arrived, arrived ^ counted.arrived


@needs_transformers
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_recording_of_every_module_changes_no_bit_and_explains_every_site(name: str, training: bool) -> None:
    check(build(TRANSFORMERS[name], training))


@needs_torchvision
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", TINY)
def test_a_recording_of_a_tiny_torchvision_model_changes_no_bit(name: str, training: bool) -> None:
    check(build(TINY[name], training))


@needs_torchvision
@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_a_recording_of_a_full_torchvision_model_changes_no_bit(name: str) -> None:
    check(build(FULL[name], training=True))


@needs_transformers
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_without_gradients_the_outputs_are_the_same_and_the_coverage_says_why_there_are_none(
    name: str, mode: Callable[[], Any]
) -> None:
    outputs = []
    with mode():
        for _ in range(2):
            case = build(TRANSFORMERS[name], training=False)
            with hookline.record(case.model, "**", PORTS) if outputs else contextlib.nullcontext() as recording:
                seed(1)
                outputs.append(tensors_of(case.model(*case.args, **case.inputs)))
    assert same(*outputs)
    coverage = recording.coverage
    fates = [fate for fate in coverage.values() if ":grad" in fate.site]
    ran = [fate for fate in fates if coverage[fate.site.replace("grad_", "")].status == "captured"]
    assert len(ran) > 20 and not any(fate.status == "captured" for fate in fates)
    assert {fate.reason for fate in ran} == {f"it ran {REASON[mode]}, which makes no graph"}


@needs_transformers
@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.usefixtures("without_collector")
def test_a_recorded_model_and_its_recording_are_freed_at_once(name: str) -> None:
    bare, case = build(TRANSFORMERS[name], True), build(TRANSFORMERS[name], True)
    step(bare)
    with hookline.record(case.model, "**", ports=PORTS) as recording:
        step(case)
    values = [weakref.ref(tensor) for event in recording for _, tensor in event.leaves()]
    assert len(values) > 50
    parts, plain = parts_of(case), parts_of(bare)
    del recording
    assert not any(value() is not None for value in values)
    del case, bare
    held = [path for path, ref in parts.items() if ref() is not None]
    assert held == [path for path, ref in plain.items() if ref() is not None], "a plain one keeps as many, in a cycle"


def parts_of(case: Case) -> dict[str, weakref.ref[Any]]:
    modules: dict[str, Any] = {f"module {path}": module for path, module in case.model.named_modules()}
    tensors = {f"parameter {path}": parameter for path, parameter in case.model.named_parameters()}
    return {path: weakref.ref(part) for path, part in (modules | tensors).items()}
