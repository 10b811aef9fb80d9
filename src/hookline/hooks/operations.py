"""Every operation that torch carries out, as a listener sees it go by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hookline.hooks.torch_private import (
    DispatchMode,
    current_node,
    nodes_made,
    sequence_number,
    storage_id,
    written_arguments,
)
from hookline.values import flatten_call, paths_of

__all__ = ["Operation", "Operations", "storage_id"]


class Operation:
    """One operation below autograd, on its way.

    Attributes:
        name: Such as ``"aten.log.default"``.
        namespace: Such as ``"aten"``.
        args, kwargs: What it was called with.
        output: What it returned; None before.
        node_name: Class of the autograd node in whose backward it runs, such as ``"SqrtBackward0"``; empty in forward.
        node_number: Number of that node, -1 in forward.
        forward_number: Number of the autograd node that was made last in this thread. For the first operation that
            sees a number, the node is its own.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.name = str(function)
        self.namespace: str = function.namespace
        self.args, self.kwargs = args, kwargs
        self.output: Any = None
        node = current_node()
        self.node_name = "" if node is None else str(node.name()).rpartition("::")[2]
        self.node_number = -1 if node is None else sequence_number(node)
        self.forward_number = nodes_made() - 1

    def inputs(self) -> Iterator[tuple[str, Any]]:
        """Name and value of each leaf of the arguments: ``self``, ``tensors[0]``."""
        names = [argument.name for argument in self.function._schema.arguments]
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        leaves, structure = flatten_call((), given)
        paths = (path.removeprefix("kwargs['").replace("']", "", 1) for path in paths_of(structure))
        return zip(paths, leaves, strict=True)

    def outputs(self) -> Iterator[tuple[str, Any]]:
        """Name and value of each leaf of what it returned: ``output``, ``output[1]``."""
        value = self.output if isinstance(self.output, (tuple, list)) else (self.output,)
        leaves, structure = flatten_call(tuple(value), {})
        one = len(value) == 1
        return zip(("output" if one else "output" + path[4:] for path in paths_of(structure)), leaves, strict=True)

    def written(self) -> Iterator[tuple[str, Any, bool]]:
        """Name and value of each argument that it writes into, and whether it does so without reading it first."""
        for place, name, is_out in written_arguments(self.function):
            value = self.args[place] if place < len(self.args) else self.kwargs.get(name)
            for one in value if isinstance(value, (tuple, list)) else (value,):
                yield name, one, is_out


class Operations(DispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, a listener stands around every operation.

    Args:
        around: Gets the operation and a function that carries it out, and returns what the operation is to return.
            What it computes itself is not seen.
    """

    def __init__(self, around: Callable[[Operation, Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = around

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch."""
        operation = Operation(func, args, dict(kwargs or {}))

        def carry_out() -> Any:
            operation.output = func(*operation.args, **operation.kwargs)
            return operation.output

        return self._around(operation, carry_out)
