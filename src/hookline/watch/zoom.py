"""Which operation inside a module makes the first non-finite value: run a copy of it, and look at every operation."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.hooks import snapshot
from hookline.hooks.operations import Operations, storage_id
from hookline.sites import label
from hookline.values import flatten, paths_of
from hookline.watch.duplicate import CannotCopy, Duplicate, duplicate
from hookline.watch.surroundings import Autocast, RandomState, autocast_state, same_random_numbers, under
from hookline.watch.trace import NeedsProcesses, Source, Trace, Value

__all__ = ["LIMIT", "Mask", "Zoom", "zoom"]

LIMIT = 1_000_000_000
"""Bytes of parameters and arguments up to which a module is copied."""

GradOutputs = Sequence["Tensor | None"] | Mapping[int, Tensor]


class Mask(NamedTuple):
    """Infinities that were written on purpose, such as -inf for a softmax.

    Attributes:
        operation: What wrote them, or the input or buffer that holds them.
        line: Where; empty for an input or buffer.
    """

    operation: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.operation} at {self.line}" if self.line else self.operation


@dataclasses.dataclass(frozen=True)
class Zoom:
    """What was seen inside a module.

    Attributes:
        reproduced: Whether a non-finite value that is no mask came out again.
        reason: Why not, or what else is to be said.
        cause: What held such a value before anything was computed, such as ``"parameter weight"`` or
            ``"input args[0]"``; the operation is then empty, and the line is that where it was first used.
        operation: The first operation that made one, such as ``"aten.log.default"``.
        line: Where it was called, such as ``"train.py:31 in forward"``; for one of a backward pass, where the operation
            was called whose backward it is.
        text: What stands on that line.
        path: The submodule that was running, relative to the module.
        direction: ``"forward"`` or ``"backward"``.
        node: In a backward pass, the autograd node, such as ``"SqrtBackward0"``.
        forward_operation: The operation of the forward that it belongs to.
        inputs, outputs: Tensors of the operation.
        masks: Infinities written on purpose. When nothing else was seen, only those that came out.
    """

    reproduced: bool = False
    reason: str = ""
    cause: str = ""
    operation: str = ""
    line: str = ""
    text: str = ""
    path: str = ""
    direction: str = ""
    node: str = ""
    forward_operation: str = ""
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    masks: tuple[Mask, ...] = ()

    def __str__(self) -> str:
        if not self.reproduced:
            return f"not reproduced: {self.reason}"
        lines = [self._headline()]
        if self.text:
            lines.append(f"  {self.text}")
        lines += [f"  in  {_described(value)}" for value in self.inputs]
        lines += [f"  out {_described(value)}" for value in self.outputs]
        if self.reason:
            lines.append(f"  {self.reason}")
        return "\n".join(lines + [f"  on purpose: {mask}" for mask in self.masks])

    def _headline(self) -> str:
        at = f" at {self.line}" if self.line else ""
        inside = f", in {label(self.path)}" if self.path else ""
        if self.cause:
            return f"{self.cause} is not finite; first used{at}{inside}"
        whose = f" of {self.forward_operation}" if self.forward_operation else ""
        node = f" (backward{whose}, {self.node})" if self.node else ""
        return f"{self.operation}{node}{at}{inside}"

    def to_json(self) -> dict[str, Any]:
        """As an object for JSON."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return plain | {
            "inputs": [value.to_json() for value in self.inputs],
            "outputs": [value.to_json() for value in self.outputs],
            "masks": [list(mask) for mask in self.masks],
        }


def zoom(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    grad_outputs: GradOutputs | None = None,
    rng: Tensor | RandomState | None = None,
    autocast: tuple[Autocast, ...] | None = None,
    limit: int = LIMIT,
) -> Zoom:
    """Run a copy of a module and find the operation that made the non-finite values which come out of it.

    Module, arguments, gradients, random numbers and modes stay as they are. Hooks that others have put on the module
    run in the copy too.

    Args:
        module: What to run, in the mode that it is in.
        args: What to call it with.
        kwargs: What to call it with by name.
        grad_outputs: To run its backward as well: one entry for each leaf of the output, None where no gradient
            arrived; or gradients by their number among the floating tensors of the output that require one.
        rng: State of the CPU's random numbers to begin with, or states by device; None for that of now.
        autocast: As ``autocast_state()`` gave it when the module ran; None for that of now.
        limit: Most bytes that are copied.

    Returns:
        What was seen. Whatever goes wrong is its ``reason``; only KeyboardInterrupt and its like are raised.
    """
    gradients = grad_outputs is not None
    try:
        with _apart(rng, autocast_state() if autocast is None else autocast, gradients):
            made = duplicate(module, tuple(args), dict(kwargs), limit)
            return _run(made, grad_outputs)
    except CannotCopy as error:
        return Zoom(reason=str(error))
    except NeedsProcesses as error:
        return Zoom(reason=f"it needs other processes, for {error}")
    except Exception as error:
        return Zoom(reason=_short(error))


@contextlib.contextmanager
def _apart(rng: Tensor | RandomState | None, autocast: tuple[Autocast, ...], gradients: bool) -> Iterator[None]:
    inference = torch.is_inference_mode_enabled() and not gradients
    with (
        same_random_numbers(rng),
        torch.inference_mode(inference),
        torch.set_grad_enabled((gradients or torch.is_grad_enabled()) and not inference),
        warnings.catch_warnings(),
        under(autocast),
        _uncompiled(),
    ):
        warnings.simplefilter("ignore")
        yield


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Inside, what torch.compile has made runs as it was written. Nothing is imported that is not in use."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _run(made: Duplicate, grad_outputs: GradOutputs | None) -> Zoom:
    frame: FrameType | None = sys._getframe()
    paths = {id(part): name for name, part in made.module.named_modules()}
    trace = Trace(paths, made.names, frame)
    with Operations(trace.around):
        try:
            output = made.module(*made.args, **made.kwargs)
        except NeedsProcesses:
            raise
        except Exception as error:
            if (source := trace.first_fault()) is None:
                raise
            return _seen(source, trace, f"then its forward raised {_short(error)}")
    leaves, structure = flatten(output)
    named = [(path, leaf) for path, leaf in zip(paths_of(structure), leaves, strict=True) if isinstance(leaf, Tensor)]
    source = trace.first_source(named)
    if source is None and not named:
        source = trace.first_fault()
    if source is None and grad_outputs is not None:
        source = _backward(made, trace, leaves, grad_outputs)
    elif grad_outputs is not None and source is not None and source.kind == "mask":
        source = _backward(made, trace, leaves, grad_outputs) or source
    if source is None:
        return Zoom(reason="all that came out was finite this time")
    return _seen(source, trace)


def _backward(made: Duplicate, trace: Trace, leaves: list[Any], grad_outputs: GradOutputs) -> Source | None:
    pairs = _pairs(leaves, grad_outputs)
    for number, (_, grad) in enumerate(pairs):
        if (key := storage_id(grad)) is not None:
            made.names[key] = f"grad_outputs[{number}]"
    if not pairs or not made.leaves:
        raise CannotCopy("no gradient arrives at an output that requires one")
    trace.direction = "backward"
    outputs, grads = zip(*pairs, strict=True)
    with Operations(trace.around):
        found = torch.autograd.grad(outputs, made.leaves, grads, allow_unused=True)
    return trace.first_source((f"gradient {n}", grad) for n, grad in enumerate(found) if grad is not None)


def _pairs(leaves: list[Any], grad_outputs: GradOutputs) -> list[tuple[Tensor, Tensor]]:
    """Outputs that require a gradient, with a copy of the one that arrived."""
    if isinstance(grad_outputs, Mapping):
        wanting = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        found = [(wanting[number], grad) for number, grad in grad_outputs.items() if number < len(wanting)]
    else:
        if len(grad_outputs) != len(leaves):
            raise CannotCopy(f"{len(grad_outputs)} gradients were given for an output with {len(leaves)} leaves")
        both = zip(leaves, grad_outputs, strict=True)
        found = [
            (leaf, grad) for leaf, grad in both if isinstance(leaf, Tensor) and leaf.requires_grad and grad is not None
        ]
    return [(leaf, snapshot(grad)) for leaf, grad in found]


def _seen(source: Source, trace: Trace, reason: str = "") -> Zoom:
    masks = {_mask(one): None for one in trace.sources if one.kind == "mask"}
    if source.kind == "mask":
        mask = _mask(source)
        return Zoom(reason=f"the only non-finite values are infinities written on purpose, by {mask}", masks=(mask,))
    notes = {"uninitialized": "the memory that it returned was read before anything was written into it",
             "given": "NaN was given to it as a number"}  # fmt: skip
    return Zoom(
        reproduced=True,
        reason=reason or notes.get(source.kind, ""),
        cause=source.cause,
        operation="" if source.cause else source.operation,
        line=source.where.line,
        text=source.where.text,
        path=source.where.path,
        direction=source.direction,
        node=source.node,
        forward_operation=source.forward_operation,
        inputs=source.inputs,
        outputs=source.outputs,
        masks=tuple(masks),
    )


def _mask(source: Source) -> Mask:
    return Mask(source.cause) if source.cause else Mask(source.operation, source.where.line)


def _described(value: Value) -> str:
    summary = value.summary
    shape = "x".join(map(str, value.shape)) or "scalar"
    text = f"{value.name}: {shape} {value.dtype}"
    if value.device != "cpu":
        text += f" on {value.device}"
    text += f", min {summary.min:.4g}, max {summary.max:.4g}, mean {summary.mean:.4g}"
    counts = [f"{count} {word}" for word, count in (("NaN", summary.nan), ("Inf", summary.inf)) if count]
    return f"{text}, {' and '.join(counts)} of {summary.numel}" if counts else text


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
