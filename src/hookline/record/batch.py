"""What the rows of values are: the samples of a batch, and the tokens that are kept of each."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from hookline.errors import ArgumentError, OptionError
from hookline.report.text import plural
from hookline.spelling import kind
from hookline.store.format import BATCH, SAMPLES, TOKENS
from hookline.values import Scaled, walk

__all__ = ["Batch", "CurrentBatch", "InBatch", "chosen_rows", "kinds_of"]


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Batch:
    """The identity of the rows of one batch; it is stored as an event of the port ``batch``.

    Attributes:
        order: Place in the recording.
        step: Step in which it was first used.
        value: ``ids``, and where tokens were chosen ``sample``, ``position`` and ``token`` of each, int64.
        skip: Whether it is recorded already, so that nothing of it is to be kept.

    Args:
        ids: Of each sample, int or str; (n,).
        tokens: Token ids of each sample, (n, length).
        mask: Which tokens to keep, (n, length), true or not 0; all by default.
    """

    path, port, call, backward, batch, writer = "", BATCH, 0, 0, None, 0

    def __init__(self, ids: Any, tokens: Any = None, mask: Any = None) -> None:
        self.order = self.step = 0
        self.skip = False
        self._ids: list[Any] = _checked_ids(ids)
        has_names = any(isinstance(one, str) for one in self._ids)
        self.value: dict[str, Any] = {"ids": self._ids if has_names else torch.tensor(self._ids, dtype=torch.int64)}
        self._grid: tuple[int, int] | None = None
        self._chosen: dict[torch.device, Tensor] = {}
        if tokens is not None or mask is not None:
            self._choose(tokens, mask)

    @property
    def ids(self) -> list[Any]:
        """The id of each sample."""
        return self._ids

    def _choose(self, tokens: Any, mask: Any) -> None:
        given = [_grid_of(name, grid, len(self._ids)) for name, grid in (("tokens", tokens), ("mask", mask))]
        shapes = {tuple(grid.shape) for grid in given if grid is not None}
        if len(shapes) != 1:
            raise OptionError(f"tokens and mask need one shape, got {' and '.join(map(str, sorted(shapes)))}.")
        ((samples, length),) = shapes
        chosen = torch.ones(samples, length, dtype=torch.bool) if given[1] is None else given[1] != 0
        places = chosen.flatten().nonzero().flatten()
        self._grid = samples, length
        self._chosen = {torch.device("cpu"): places}
        self.value |= {"sample": places // max(length, 1), "position": places % max(length, 1)}
        if given[0] is not None:
            self.value["token"] = given[0].flatten()[places].to(torch.int64)

    def count(self, rows: str) -> int:
        """How many rows there are of a kind."""
        return len(self._ids) if rows == SAMPLES else len(self.value["sample"])

    def select(self, tensor: Tensor) -> tuple[Tensor, str | None]:
        """The rows of a tensor that are to be kept, and of which kind they are; all of one that has no such rows."""
        if tensor.is_nested or tensor.layout is not torch.strided:
            return tensor, None
        shape = tuple(tensor.shape)
        if self._grid is not None and (shape[:2] == self._grid or shape[:1] == (self._grid[0] * self._grid[1],)):
            rest = shape[2:] if shape[:2] == self._grid else shape[1:]
            flat = tensor.reshape(self._grid[0] * self._grid[1], *rest)
            places = self._places(tensor.device)
            return (flat if len(places) == len(flat) else _picked(flat, places)), TOKENS
        return tensor, SAMPLES if shape[:1] == (len(self._ids),) else None

    def _places(self, device: torch.device) -> Tensor:
        if device not in self._chosen:
            self._chosen[device] = next(iter(self._chosen.values())).to(device)
        return self._chosen[device]

    # ------------------------------------------------------------ as the store sees it

    def leaves(self) -> list[tuple[str, Tensor]]:
        """Value path and tensor of each tensor."""
        return [(path, leaf) for path, leaf in walk(self.value, BATCH) if isinstance(leaf, Tensor)]

    def known_summaries(self) -> dict[str, Any]:
        """None: they are no measurements."""
        return {}

    def rows(self) -> dict[str, str]:
        """None of its own."""
        return {}


class InBatch(contextlib.ContextDecorator, contextlib.AbstractContextManager[bool]):
    """What ``rec.batch`` returns; each with-block that it is used for is a batch of its own.

    Args:
        batch: What the rows are.
        enter: Makes the context manager of one with-block.
    """

    def __init__(self, batch: Batch, enter: Callable[[Batch], contextlib.AbstractContextManager[bool]]) -> None:
        self._batch, self._enter = batch, enter
        self._inside = threading.local()

    def __enter__(self) -> bool:
        context = self._enter(copy.copy(self._batch))
        wanted = context.__enter__()
        self._inside.stack = [*getattr(self._inside, "stack", ()), context]
        return wanted

    def __exit__(self, *exception: Any) -> None:
        stack = getattr(self._inside, "stack", [])
        if not stack:
            raise OptionError("a batch ends in the thread in which it began: use `with rec.batch(...):` there.")
        context = stack.pop()
        context.__exit__(*exception)  # it swallows nothing


class CurrentBatch(threading.local):
    """The batch that a thread is in.

    Attributes:
        value: What the rows of its calls are; None where that was not said.
    """

    value: Batch | None = None

    @property
    def passes_over(self) -> bool:
        """Whether the thread runs what is recorded already."""
        return self.value is not None and self.value.skip

    @contextlib.contextmanager
    def inside(self, batch: Batch, recorded: Set[Any]) -> Iterator[bool]:
        """Give the calls of the thread their rows; says whether they are to be recorded.

        Args:
            batch: The rows.
            recorded: Ids that are recorded already.

        Raises:
            OptionError: Some of the samples are recorded already and others not.
        """
        ids = set(batch.ids)
        done = len(ids & recorded)
        if 0 < done < len(ids):
            raise OptionError(
                f"{done} of the {len(ids)} ids of this batch are recorded already, the others are not. Resume with the "
                "same batches, or leave those samples out."
            )
        batch.skip = done > 0
        before, self.value = self.value, batch
        try:
            yield not batch.skip
        finally:
            self.value = before


def chosen_rows(batch: Batch, leaves: list[Any], *, detach: bool) -> tuple[list[Any], list[str | None]]:
    """The leaves of a value with the rows that are wanted, and of which kind these are."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        pairs = [batch.select(leaf) if isinstance(leaf, Tensor) else (leaf, None) for leaf in leaves]
    return [leaf for leaf, _ in pairs], [kind for _, kind in pairs]


def _picked(flat: Tensor, places: Tensor) -> Tensor:
    try:
        return flat.index_select(0, places)
    except NotImplementedError:  # for some dtypes; for whole numbers of the same size it is
        whole = _WHOLE[flat.element_size()]
        return flat.view(whole).index_select(0, places).view(flat.dtype)


def kinds_of(batch: Batch, kinds: list[str | None], kept: list[Any]) -> tuple[str | None, ...]:
    """The kind of rows of each tensor as it is kept; None where ``reduce`` has left other ones."""
    return tuple(
        rows if rows is not None and tensor.shape[:1] == (batch.count(rows),) else None
        for rows, leaf in zip(kinds, kept, strict=True)
        for tensor in (leaf if isinstance(leaf, Scaled) else (leaf,))
        if isinstance(tensor, Tensor)
    )


def _checked_ids(ids: Any) -> Any:
    found = ids.tolist() if isinstance(ids, Tensor) or type(ids).__module__ == "numpy" else ids
    if isinstance(found, (str, bytes)) or not isinstance(found, Sequence):
        raise ArgumentError(f"ids: got {kind(ids)}, wanted one id for each sample, such as [17, 18] or a 1-d tensor.")
    kinds = {type(one) for one in found}
    if not kinds <= {int} and not kinds <= {str}:
        names = ", ".join(sorted(k.__name__ for k in kinds))
        raise ArgumentError(f"ids have to be all int or all str, got {names}. Tensors become int by tolist().")
    if kinds == {int} and not all(-(2**63) <= one < 2**63 for one in found):
        raise ArgumentError("ids have to fit into int64; give larger ones as str.")
    return list(found)


def _grid_of(name: str, grid: Any, samples: int) -> Tensor | None:
    if grid is None:
        return None
    try:
        found = torch.as_tensor(grid).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(
            f"{name}: got {kind(grid)}, wanted whole numbers or bools, a line of one length for each id ({error})."
        ) from error
    if found.dim() != 2 or found.shape[0] != samples or found.is_floating_point():
        raise OptionError(
            f"{name}: got {found.dtype} of shape {list(found.shape)}, wanted whole numbers or bools of shape "
            f"[{samples}, length], a line for each of the {plural(samples, 'id')}."
        )
    return found
