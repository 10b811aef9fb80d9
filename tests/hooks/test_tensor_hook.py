"""A hook on one tensor: the gradient of the value that it has when the hook is registered."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hookline
from hookline.errors import ArgumentError, HookError, MutationError

from .reference import equal, leaf, vector

ONES = vector(1, 1, 1)


def seen_by(tensor: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    hookline.register_tensor_hook(tensor, seen.append)
    return seen


# ---------------------------------------------------------------- what it sees


def test_a_leaf_an_intermediate_and_an_output_see_their_gradients() -> None:
    x = leaf()
    h = x * 2
    y = h * 3
    seen = [seen_by(tensor) for tensor in (x, h, y)]
    (y * 5).sum().backward()
    assert equal(seen, [[30 * ONES], [15 * ONES], [5 * ONES]])


def test_it_is_the_total_of_all_uses() -> None:
    h = leaf() * 1
    seen = seen_by(h)
    (h * 2 + h * 3).sum().backward()
    assert equal(seen, [5 * ONES])


def test_hooks_run_as_they_were_registered_and_each_gets_what_the_one_before_returned() -> None:
    x = leaf()
    h = x * 1
    hookline.register_tensor_hook(h, lambda grad: grad + 1)
    hookline.register_tensor_hook(h, lambda grad: grad * 10)
    h.sum().backward()
    assert equal(x.grad, 20 * ONES)


def test_it_sees_autograd_grad_as_well() -> None:
    x = leaf()
    seen = seen_by(x)
    torch.autograd.grad((x * 4).sum(), x)
    assert equal(seen, [4 * ONES])


def test_the_hook_stays_with_the_value_that_a_write_replaces() -> None:
    h = leaf() * 1
    seen = seen_by(h)
    h.mul_(3)
    h.sum().backward()
    assert equal(seen, [3 * ONES]), "the gradient of the value before the write"


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "part": lambda base: base[1:],
    "row": lambda base: base.view(3, 1)[1],
    "reshaped": lambda base: base.view(3, 1),
    "transposed": lambda base: base.view(1, 3).t(),
    "strided": lambda base: base[::2],
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "none": lambda base, view: None,
    "through the view": lambda base, view: view.mul_(3),
    "through the base": lambda base, view: base.mul_(3),
    "through another view": lambda base, view: base[:2].mul_(3),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("used", ["base", "view", "both"])
def test_a_hook_on_a_view_sees_the_gradient_of_the_values_that_the_view_had(view: str, write: str, used: str) -> None:
    factors = vector(2, 5, 7)  # of the base in the loss; a view counts 11 times

    def loss(base: Tensor, viewed: Tensor) -> Tensor:
        total = base.sum() * 0
        if used in ("base", "both"):
            total = total + (base * factors).sum()
        if used in ("view", "both"):
            total = total + (viewed * 11).sum()
        return total

    # By hand: which entries of the base the view covers, what a write multiplies, and what each use weighs.
    places = VIEWS[view](torch.arange(3)).flatten()
    factor_of_write = torch.ones(3, dtype=torch.float64)
    WRITES[write](factor_of_write, VIEWS[view](factor_of_write))
    by_use = torch.zeros(3, dtype=torch.float64)
    by_use[places] += factors[places] * (used != "view") + 11 * (used != "base")
    expected = VIEWS[view]((by_use * factor_of_write).clone())

    x = leaf()
    base = x * 1
    viewed = VIEWS[view](base)
    seen = seen_by(viewed)
    WRITES[write](base, viewed)
    loss(base, viewed).backward()
    if write == "none":
        # Nobody wrote, so the base's own uses do not pass by the view: PyTorch's meaning of a gradient of a tensor.
        if used == "base":
            assert seen == [] or equal(seen, [torch.zeros_like(viewed)])
        else:
            assert equal(seen, [torch.full_like(viewed, 11)])
        return
    assert equal(seen, [expected])
    full = (factors * (used != "view")).clone()
    full[places] = by_use[places]
    assert equal(x.grad, full * factor_of_write)


def test_a_hook_on_a_view_may_replace_its_gradient_also_after_a_write() -> None:
    for write in (False, True):
        x = leaf()
        base = x * 1
        part = base[1:]
        hookline.register_tensor_hook(part, lambda grad: grad * 10)
        if write:
            base.mul_(3)
            (base * vector(1, 2, 3)).sum().backward()
            assert equal(x.grad, vector(3, 60, 90))
        else:
            part.sum().backward()
            assert equal(x.grad, vector(0, 10, 10))


def test_each_pass_is_one_call_of_the_hook() -> None:
    base = leaf() * 1
    part = base[1:]
    seen = seen_by(part)
    part.mul_(2)
    for _ in range(3):
        base.sum().backward(retain_graph=True)
    assert equal(seen, [vector(2, 2)] * 3)


def test_a_view_of_a_leaf_is_seen() -> None:
    x = leaf()
    part = x[1:]
    seen = seen_by(part)
    (part * 4).sum().backward()
    assert equal(seen, [vector(4, 4)]) and equal(x.grad, vector(0, 4, 4))


# ---------------------------------------------------------------- what it may do


def test_none_keeps_the_gradient_and_a_tensor_replaces_it() -> None:
    for returned, expected in ((lambda grad: None, ONES), (lambda grad: grad * 7, 7 * ONES)):
        x = leaf()
        hookline.register_tensor_hook(x * 1, returned)
        h = x * 1
        hookline.register_tensor_hook(h, returned)
        h.sum().backward()
        assert equal(x.grad, expected)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda grad: grad[:1], r"returned shape \(1,\), torch.float64 on cpu .*wanted shape \(3,\)"),
        (lambda grad: grad.float(), r"returned shape \(3,\), torch.float32 .*wanted shape \(3,\), torch.float64"),
        (lambda grad: 5, r"returned int 5 .*wanted a tensor or None"),
        (lambda grad: (grad,), r"returned tuple .*wanted a tensor or None"),
    ],
)
def test_a_wrong_gradient_is_an_error_that_says_what_was_got_and_wanted(
    returned: Callable[[Tensor], Any], message: str
) -> None:
    h = leaf() * 1
    hookline.register_tensor_hook(h, returned)
    with pytest.raises(HookError, match=rf"the tensor hook .*at tensor of shape \(3,\) {message}"):
        h.sum().backward()


def test_a_write_into_the_gradient_is_an_error_and_reaches_nobody() -> None:
    x, h, other = leaf(), leaf() * 1, leaf()
    hookline.register_tensor_hook(h, lambda grad: [grad.mul_(100), None][1])
    with pytest.raises(MutationError, match=r"wrote into grad.* in place"):
        ((other * 1 + h + x) * 1).sum().backward()
    assert all(t.grad is None or equal(t.grad, ONES) for t in (x, other))


def test_an_exception_reaches_the_user_with_a_note() -> None:
    def failing(grad: Tensor) -> None:
        raise KeyError("of the user")

    h = leaf() * 1
    hookline.register_tensor_hook(h, failing)
    with pytest.raises(KeyError) as caught:
        h.sum().backward()
    (note,) = caught.value.__notes__
    assert note.startswith("Raised by the tensor hook ") and note.endswith("failing at tensor of shape (3,).")


def test_a_gradient_that_was_kept_does_not_change() -> None:
    x = leaf()
    kept = seen_by(x)
    for _ in range(2):
        x.sum().backward()
    x.grad.zero_()
    assert equal(kept, [ONES, ONES])


# ---------------------------------------------------------------- registration and removal


def test_only_tensors_that_require_a_gradient_can_be_hooked() -> None:
    with pytest.raises(ArgumentError, match=r"a tensor hook is put on a torch\.Tensor, got int: 5"):
        hookline.register_tensor_hook(5, print)
    with pytest.raises(ArgumentError, match="a hook is a function, got str: 'print'"):
        hookline.register_tensor_hook(leaf(), "print")
    with pytest.raises(HookError, match=r"no gradient is computed for this tensor of shape \(3,\).*requires_grad_\(\)"):
        hookline.register_tensor_hook(ONES, print)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 1, lambda x: (x * 1)[1:]])
def test_a_removed_hook_does_not_run(make: Callable[[Tensor], Tensor]) -> None:
    tensor = make(leaf())
    seen: list[Any] = []
    handle = hookline.register_tensor_hook(tensor, seen.append)
    with hookline.register_tensor_hook(tensor, seen.append):
        pass
    handle.remove()
    handle.remove()
    tensor.sum().backward()
    assert seen == []


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 1, lambda x: (x * 1)[1:]])
def test_a_hook_may_remove_itself(make: Callable[[Tensor], Tensor]) -> None:
    tensor, seen = make(leaf()), []
    handle = hookline.register_tensor_hook(tensor, lambda grad: [seen.append(grad), handle.remove()][1])
    for _ in range(2):
        tensor.sum().backward(retain_graph=True)
    assert len(seen) == 1


@pytest.mark.parametrize("make", [lambda x: x * 1, lambda x: (x * 1)[1:]])
def test_tensor_graph_and_hook_are_freed_without_the_collector(make: Callable[[Tensor], Tensor]) -> None:
    class Hook:
        def __call__(self, grad: Tensor) -> None:
            pass

    gc.collect()
    gc.disable()
    try:
        hook, tensor = Hook(), make(leaf())
        handle = hookline.register_tensor_hook(tensor, hook)
        tensor.sum().backward()
        refs = [weakref.ref(hook), weakref.ref(tensor)]
        del hook, tensor, handle
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
