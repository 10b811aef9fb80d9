"""The private parts of PyTorch that the engine stands on: they are there and behave as it relies on.

When a test here fails after an upgrade of PyTorch, the wrapper of the same name in ``torch_private.py`` needs a new
way.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.hooks import snapshot, torch_private
from hookline.hooks.snapshot import alike

from .reference import equal, leaf


def address(tensor: Tensor) -> int:
    """Where the tensor's memory is, without making a copy-on-write clone a real one as ``data_ptr`` does."""
    return int(torch._C._data_address(tensor))


# ---------------------------------------------------------------- copy on write

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.add_(1),
    "through a view": lambda x: x.view(-1)[0].fill_(9),
    "through .data": lambda x: x.data.add_(3),
    "through detach": lambda x: x.detach().add_(3),
    "by index": lambda x: x.__setitem__(0, 7),
    "through numpy": lambda x: x.numpy().__setitem__(0, 7),
    "with out=": lambda x: torch.ones(4, out=x),
    "with copy_": lambda x: x.copy_(torch.ones(4)),
    "zero_": lambda x: x.add_(1).zero_().sub_(1),
    "random": lambda x: x.uniform_(2, 3),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(5.0)),
    "scatter_": lambda x: x.scatter_(0, torch.tensor([1]), 5.0),
    "relu inplace": lambda x: nn.functional.threshold_(x, 0.5, 7.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_lazy_clone_keeps_its_values_whatever_writes_to_the_original(write: str, whole: bool) -> None:
    x = torch.zeros(4) if whole else torch.zeros(6)[1:5]
    kept = torch_private.lazy_clone(x)
    assert kept is not None and address(kept) == address(x), "no copy until somebody writes"
    WRITES[write](x)
    assert not equal(x, torch.zeros(4))
    assert equal(kept, torch.zeros(4))


@pytest.mark.parametrize("write", WRITES)
def test_a_lazy_clone_may_be_written_to_and_the_original_keeps_its_values(write: str) -> None:
    x = torch.zeros(4)
    kept = torch_private.lazy_clone(x)
    assert kept is not None
    WRITES[write](kept)
    assert not equal(kept, torch.zeros(4)) and equal(x, torch.zeros(4))


def test_reading_copies_nothing() -> None:
    x = torch.randn(4)
    kept = torch_private.lazy_clone(x)
    assert kept is not None
    _ = x + 1, kept * 2, x.sum(), torch.equal(x, kept), x[1:], x.tolist(), x.clone(), x @ kept
    assert address(kept) == address(x)


def test_a_lazy_clone_is_differentiable_as_clone_is() -> None:
    x = leaf()
    made = torch_private.lazy_clone(x)
    assert made is not None
    (made * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3, 3]


def test_a_lazy_clone_of_a_lazy_clone_and_of_a_part_hold() -> None:
    x = torch.arange(6.0)
    first = torch_private.lazy_clone(x)
    assert first is not None
    second, part = torch_private.lazy_clone(first), torch_private.lazy_clone(x[2:4])
    x.zero_()
    first.fill_(1)
    assert equal(second, torch.arange(6.0)) and equal(part, torch.tensor([2.0, 3.0]))


REFUSED: dict[str, Callable[[], Tensor]] = {
    "memory of numpy": lambda: torch.from_numpy(np.zeros(4, dtype=np.float32)),
    "memory of another process": lambda: torch.zeros(4).share_memory_(),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_where_a_lazy_clone_is_refused_a_snapshot_is_a_clone(kind: str) -> None:
    x = REFUSED[kind]()
    before = x.clone().to_dense() if x.layout != torch.strided else x.clone()
    assert torch_private.lazy_clone(x) is None
    for kept in (snapshot(x), alike(x)):
        x.mul_(0)
        if x.layout == torch.strided:
            x.add_(5)
        assert equal(kept.to_dense() if kept.layout != torch.strided else kept, before)
        x = REFUSED[kind]()


KEPT: dict[str, Callable[[], Tensor]] = REFUSED | {
    "plain": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "strided": lambda: torch.randn(8)[::2],
    "no elements": lambda: torch.zeros(0, 3),
    "no axes": lambda: torch.tensor(3.0),
    "whole numbers": lambda: torch.arange(4),
    "booleans": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.randn(4).bfloat16(),
    "float8": lambda: torch.randn(4).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "requires grad": lambda: torch.randn(4, requires_grad=True) * 1,
    "parameter": lambda: nn.Parameter(torch.randn(4)),
    "channels last": lambda: torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "meta": lambda: torch.zeros(4, device="meta"),
}


def take_away_lazy_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(tensor: Tensor) -> None:
        raise AttributeError("'Tensor' object has no attribute '_lazy_clone'")

    monkeypatch.setattr(torch.Tensor, "_lazy_clone", property(missing), raising=False)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("missing", [False, True])
def test_a_snapshot_has_values_shape_dtype_and_no_graph_with_and_without_the_private_function(
    kind: str, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing:
        take_away_lazy_clone(monkeypatch)
    x = KEPT[kind]()
    kept = snapshot(x)
    assert (kept.shape, kept.dtype, kept.device, kept.layout) == (x.shape, x.dtype, x.device, x.layout)
    assert not kept.requires_grad and kept.grad_fn is None and kept is not x
    if kind != "meta":
        assert equal(kept.to_dense().float() if kind == "float8" else _dense(kept), _plain(x, kind))
    if missing and x.layout == torch.strided and not x.is_meta and x.numel():
        assert address(kept) != address(x)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()


def _plain(tensor: Tensor, kind: str) -> Tensor:
    return tensor.float() if kind == "float8" else _dense(tensor).resolve_conj()


def test_recordings_are_right_without_copy_on_write(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away_lazy_clone(monkeypatch)
    assert torch_private.lazy_clone(torch.zeros(3)) is None
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with hookline.record(model, ports=("input", "output")) as recording:
        output = model(torch.randn(4, 3))
    assert (recording["0"].output < 0).any(), "the value before the write"
    assert equal(recording["1"].output, output.detach()) and equal(recording["1"].input, recording["0"].output)


# ---------------------------------------------------------------- versions and histories


def test_preserve_version_leaves_the_counter_as_it_was() -> None:
    x = torch.zeros(3)
    before = torch_private.version(x)
    with torch_private.preserve_version(x):
        x.add_(1)
    assert torch_private.version(x) == before == 0
    x.add_(1)
    assert torch_private.version(x) == 1


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        x = torch.zeros(3)
    assert torch_private.version(x) is None


def test_a_version_probe_shares_the_counter_and_no_memory() -> None:
    for x in (torch.zeros(1000), torch.zeros(1000)[1:], leaf() * 1, torch.zeros(3, dtype=torch.int64)):
        probe = torch_private.version_probe(x)
        before = torch_private.version(probe)
        assert probe.numel() == 0 and torch_private.storage_id(probe) != torch_private.storage_id(x)
        x.add_(1)
        assert torch_private.version(probe) == before + 1
        x.view(-1)[:1].add_(1)
        assert torch_private.version(probe) == before + 2
        x.detach().add_(1)
        assert torch_private.version(probe) == before + 3


def test_a_detached_tensor_is_no_view_and_shares_memory_and_counter() -> None:
    """What the aliases at a boundary are made of."""

    class Hands(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x.detach(), x.detach()

        @staticmethod
        def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
            return first + second

    x = leaf() * 1
    first, second = Hands.apply(x)
    assert not torch_private.is_view(first) and torch_private.base_of(first) is None
    assert torch_private.storage_id(first) == torch_private.storage_id(x)
    first.mul_(2)
    assert x._version == second._version == 1 and equal(x.detach(), first.detach())
    (first + second).sum().backward()


def test_views_and_their_bases_are_told_apart() -> None:
    x = leaf() * 1
    part = x[1:]
    assert torch_private.is_view(part) and torch_private.base_of(part) is x
    assert torch_private.base_of(part[1:]) is x, "the base of a view of a view is the first tensor"
    assert not torch_private.is_view(x) and torch_private.base_of(x) is None


def _made_without_gradients() -> Tensor:
    x = leaf() * 1
    with torch.no_grad():
        return x.view(3, 1)


REFUSES: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "leaf": (lambda: leaf(), True),
    "view of a leaf": (lambda: leaf()[1:], True),
    "output of chunk": (lambda: (leaf() * 1).chunk(3)[0], True),
    "output of unbind": (lambda: (leaf() * 1).unbind()[0], True),
    "view made without gradients": (_made_without_gradients, True),
    "result": (lambda: leaf() * 1, False),
    "view of a result": (lambda: (leaf() * 1)[1:], False),
    "plain part of a plain tensor": (lambda: torch.zeros(3).requires_grad_()[1:].detach().requires_grad_() * 1, False),
}


@pytest.mark.parametrize("kind", REFUSES)
def test_what_refuses_in_place_says_is_what_autograd_does(kind: str) -> None:
    make, refuses = REFUSES[kind]
    assert torch_private.refuses_in_place(make()) is refuses
    if refuses:
        with pytest.raises(RuntimeError, match=r"in-?place"):
            make().mul_(2)
    else:
        make().mul_(2)


@pytest.mark.parametrize("kind", sorted(kind for kind, (_, refuses) in REFUSES.items() if refuses))
def test_an_alias_of_what_refuses_writes_refuses_them_as_well_and_is_untouched(kind: str) -> None:
    make, _ = REFUSES[kind]
    module = nn.Identity()
    hookline.register_backward_hook(module, lambda *_: None)
    x = make()
    y = module(x)
    before = y.detach().clone()
    with pytest.raises(RuntimeError, match=r"in-?place"):
        y.mul_(2)
    assert equal(x.detach(), before)


def test_numbers_of_nodes_rise() -> None:
    x = leaf()
    first = x * 1
    second = first * 1
    numbers = [torch_private.sequence_number(node) for node in (first.grad_fn, second.grad_fn)]
    assert numbers == sorted(numbers) and numbers[0] < numbers[1]


def test_tensors_that_share_memory_have_one_storage_number() -> None:
    x = torch.zeros(3)
    number = torch_private.storage_id(x)
    assert number is not None
    assert number == torch_private.storage_id(x[1:]) == torch_private.storage_id(x.detach())
    assert number != torch_private.storage_id(x.clone())
    assert torch_private.storage_bytes(x[1:]) == 12
    sparse = torch.eye(3).to_sparse()
    assert torch_private.storage_id(sparse) is None and torch_private.storage_bytes(sparse) is None


# ---------------------------------------------------------------- a backward pass


def at_gradient(do: Callable[[], Any]) -> Tensor:
    """A loss whose backward calls ``do``."""
    h = leaf() * 1
    h.register_hook(lambda grad: [do(), None][1])
    return h.sum()


def test_a_backward_pass_has_a_number_of_its_own() -> None:
    assert torch_private.graph_task_id() == -1
    numbers: list[int] = []

    def nested() -> None:
        numbers.append(torch_private.graph_task_id())
        with torch.enable_grad():
            at_gradient(lambda: numbers.append(torch_private.graph_task_id())).backward()
        numbers.append(torch_private.graph_task_id())

    at_gradient(nested).backward()
    at_gradient(lambda: numbers.append(torch_private.graph_task_id())).backward()
    outer, inner, again, later = numbers
    assert outer == again and len({outer, inner, later}) == 3 and min(numbers) >= 0
    assert torch_private.graph_task_id() == -1


def test_two_threads_have_numbers_of_their_own() -> None:
    numbers: list[int] = []
    threads = [
        threading.Thread(target=at_gradient(lambda: numbers.append(torch_private.graph_task_id())).backward)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(numbers)) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_runs_inside_a_backward_pass(reentrant: bool) -> None:
    inside: list[bool] = []

    def function(x: Tensor) -> Tensor:
        inside.append(torch_private.graph_task_id() != -1)
        return x.sin()

    checkpoint(function, leaf() * 1, use_reentrant=reentrant).sum().backward()
    assert inside == [False, True]


def test_a_function_for_the_end_of_the_pass_runs_after_everything_else() -> None:
    log: list[str] = []
    x = leaf()
    x.register_post_accumulate_grad_hook(lambda _: log.append("leaf"))
    h = x * 1
    h.register_hook(lambda _: [torch_private.at_end_of_backward(lambda: log.append("end")), None][1])
    h.sum().backward()
    assert log == ["leaf", "end"]


def test_a_function_for_the_end_of_the_pass_may_raise_and_the_user_sees_it() -> None:
    def failing() -> None:
        raise KeyError("at the end")

    with pytest.raises(KeyError, match="at the end"):
        at_gradient(lambda: torch_private.at_end_of_backward(failing)).backward()


def test_a_function_for_the_end_of_the_pass_is_dropped_when_the_pass_raises() -> None:
    log: list[str] = []

    def do() -> None:
        torch_private.at_end_of_backward(lambda: log.append("end"))
        raise KeyError

    with pytest.raises(KeyError):
        at_gradient(do).backward()
    at_gradient(lambda: None).backward()
    assert log == []


# ---------------------------------------------------------------- transforms, tracing, scripting


def test_it_is_known_whether_a_transform_runs() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch_private.transforms_active())
        return x.sum()

    assert not torch_private.transforms_active()
    vmap(function)(torch.ones(2, 3))
    grad(function)(torch.ones(3))
    assert seen == [True, True] and not torch_private.transforms_active()


def test_requires_grad_looks_through_vmap() -> None:
    seen: list[tuple[bool, bool]] = []

    def function(x: Tensor) -> Tensor:
        seen.append((x.requires_grad, torch_private.requires_grad(x)))
        return x * 2

    vmap(function)(torch.ones(2, 3, requires_grad=True))
    vmap(vmap(function))(torch.ones(2, 2, 3, requires_grad=True))
    vmap(function)(torch.ones(2, 3))
    assert seen == [(False, True), (False, True), (False, False)]
    assert torch_private.requires_grad(leaf()) and not torch_private.requires_grad(torch.ones(3))


def test_the_full_batch_has_the_mapped_axes_in_front() -> None:
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(torch_private.full_batch(x).detach())
        return x.sum()

    x = torch.randn(4, 3)
    vmap(keep)(x)
    vmap(keep, in_dims=1)(x)
    vmap(grad(keep))(x)
    assert equal(seen, [x, x.t(), x])
    y = torch.randn(2, 4, 3)
    vmap(vmap(keep))(y)
    assert equal(seen[-1], y)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_tracing_and_scripting_are_noticed() -> None:
    seen: list[bool] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch_private.is_tracing())
            return x * 2

    torch.jit.trace(Looks(), torch.ones(2), check_trace=False)
    assert seen == [True] and not torch_private.is_tracing()
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert torch_private.is_scripted(scripted) and not torch_private.is_scripted(nn.Linear(2, 2))


def test_the_early_stop_of_a_recomputation_is_told_from_an_error() -> None:
    caught: list[BaseException] = []

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return x.sin().cos() + x.exp()
            except BaseException as error:
                caught.append(error)
                raise

    checkpoint(Block(), leaf() * 1, use_reentrant=False).sum().backward()
    assert len(caught) == 1 and torch_private.is_early_stop(caught[0])
    assert not torch_private.is_early_stop(RuntimeError())


def test_a_symbolic_trace_is_told() -> None:
    seen = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch_private.is_symbolic_trace())
            return x * 2

    torch.fx.symbolic_trace(Looks())
    assert seen == [True] and not torch_private.is_symbolic_trace()


def stands_for_relu(x: Tensor) -> Tensor:
    raise AssertionError("TorchScript calls the built-in function")


def uses_it(x: Tensor) -> Tensor:
    return stands_for_relu(x)


def test_a_wrapper_of_a_built_in_function_can_be_scripted() -> None:
    torch_private.script_like(stands_for_relu, torch.relu)
    assert torch.jit.script(uses_it)(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_a_tensor_is_told_from_another_by_its_hook() -> None:
    x, y = leaf(), leaf()
    handle = x.register_hook(lambda grad: None)
    assert torch_private.has_hook(x, handle) and not torch_private.has_hook(y, handle)
    handle.remove()
    assert not torch_private.has_hook(x, handle)


def test_forward_mode_is_told() -> None:
    assert not torch_private.forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.forward_mode()
    assert not torch_private.forward_mode()


def test_the_hooks_of_a_swapped_tensor_are_called_again() -> None:
    x, y, seen = leaf(), leaf(), []
    x.register_hook(seen.append)
    before = torch_private.inner_id(x)
    assert before == torch_private.inner_id(x) != torch_private.inner_id(y)
    torch.utils.swap_tensors(x, y)
    assert torch_private.inner_id(x) != before
    torch_private.hook_again(x)
    x.sum().backward()
    assert len(seen) == 1


def test_a_compilation_is_told_also_between_its_looks_at_the_code() -> None:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(torch_private.is_tracing_a_graph())
        return graph.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of itself when it is first imported
        torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(2))
    assert seen == [True] and not torch_private.is_tracing_a_graph()


def test_the_whole_of_a_batched_gradient_is_found() -> None:
    seen: list[Tensor] = []
    x = leaf()
    y = x * 2
    y.register_hook(lambda grad: seen.append(torch_private.older_full_batch(grad)))
    batch = torch.arange(6, dtype=torch.float64).view(2, 3)
    torch.autograd.grad(y, x, batch, is_grads_batched=True)
    assert equal(seen, [batch]) and torch_private.older_full_batch(batch) is batch


def test_the_address_of_a_tensor_leaves_a_snapshot_lazy() -> None:
    tensor = torch.randn(10, 4)
    assert torch_private.address(tensor) == tensor.data_ptr()
    assert torch_private.address(tensor[3:, 1:]) == tensor[3:, 1:].data_ptr()
    copy = torch_private.lazy_clone(tensor)
    assert copy is not None
    assert torch_private.address(copy) and torch._C._is_cow_tensor(copy)
    assert torch_private.address(torch.eye(2).to_sparse()) is None
    seen: list[int | None] = []
    vmap(lambda row: seen.append(torch_private.address(row)) or row)(tensor)
    assert seen == [None]


def test_the_threads_of_torch_are_found() -> None:
    found = torch_private.openmp_parallel()
    if sys.platform == "linux" and "openmp" in torch.__config__.parallel_info().lower():
        assert found, "torch's wheels for Linux have libgomp in torch/lib; where is it now?"


def test_a_compiled_module_is_told() -> None:
    module = nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of itself when it is first imported
        assert torch_private.is_compiled(torch.compile(module, backend="eager"))
        assert not torch_private.is_compiled(module)
        module.compile(backend="eager")
    assert torch_private.is_compiled(module)


# ---------------------------------------------------------------- all of them, and nowhere else


def test_every_function_has_a_test_and_says_since_when() -> None:
    source = Path(torch_private.__file__).read_text("utf-8")
    tests = Path(__file__).read_text("utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            assert f"torch_private.{node.name}(" in tests or node.name in ("copy_creation_meta",), node.name
            assert ast.get_docstring(node), node.name


# ---------------------------------------------------------------- operations


def test_a_dispatch_mode_sees_forward_and_backward_and_imports_no_compiler() -> None:
    """In a process of its own, since here the compiler may be imported already."""
    code = """
import sys, torch
from hookline.hooks.operations import Operations
seen = []
def around(operation, carry_out):
    seen.append((operation.name, operation.node_name, operation.node_number, operation.forward_number))
    return carry_out()
x = torch.ones(2, requires_grad=True)
with Operations(around):
    y = x.exp().sqrt()
    torch.autograd.grad(y, x, torch.ones(2))
number = y.grad_fn._sequence_nr()
assert ("aten.exp.default", "", -1, number - 1) in seen and ("aten.sqrt.default", "", -1, number) in seen, seen
assert ("aten.div.Tensor", "SqrtBackward0", number, number) in seen, seen
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_written_arguments_of_an_operation() -> None:
    assert torch_private.written_arguments(torch.ops.aten.add.Tensor) == []
    assert torch_private.written_arguments(torch.ops.aten.add_.Tensor) == [(0, "self", False)]
    assert torch_private.written_arguments(torch.ops.aten.mm.out) == [(2, "out", True)]


def test_the_current_node_is_none_outside_a_backward_pass() -> None:
    nodes = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    x.register_hook(lambda grad: nodes.append(torch_private.current_node()))
    made = torch_private.nodes_made()
    y.sum().backward()
    assert torch_private.current_node() is None and made == torch_private.sequence_number(y.grad_fn) + 1
