"""Whether a module's way of computing depends on two of its arguments being the same object."""

from __future__ import annotations

import dis
import inspect
import weakref
from typing import Any

from torch import nn

from hookline.hooks.token import original_class

__all__ = ["compares_identity"]

_ASKS = "multi_head_attention_forward"


def compares_identity(module: nn.Module | None) -> bool:
    """Whether the module or one below it asks ``a is b`` of its values, as attention asks ``query is key``."""
    return module is not None and any(_class_compares(original_class(below)) for below in module.modules())


_known: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _class_compares(cls: Any) -> bool:
    found = _known.get(cls)
    if found is None:
        found = _known[cls] = _forward_compares(cls)
    return found


def _forward_compares(cls: Any) -> bool:
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None:
        return False
    return _ASKS in code.co_names or any(_asks_of_values(code))


def _asks_of_values(code: Any) -> Any:
    """For each ``is`` in the code, whether both sides are values (not None, True, False or another constant)."""
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP":
            yield before is None or before.opname != "LOAD_CONST"
        before = instruction
