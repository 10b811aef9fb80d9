"""What a watch measures: series of values, and what one step gave of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hookline.sites import label
from hookline.stats.summary import FIELDS

__all__ = ["FIELDS", "PORTS", "Frame", "Series", "absmax", "rms"]

PORTS = ("output", "grad_output", "parameter", "parameter_grad", "update", "loss")
"""What can be watched. ``update`` is the change of a parameter in an optimizer step."""

_COLUMN = {name: place for place, name in enumerate(FIELDS)}


class Series(NamedTuple):
    """What the rows of a watch are about.

    Attributes:
        path: The module; ``""`` is the root.
        port: One of ``PORTS``.
        place: Value path of the tensor inside the output, ``""`` where it is the output; the own name of a parameter.
        type_name: Class of the module.
        dtype: Of the tensor, such as ``"float32"``.
    """

    path: str
    port: str
    place: str = ""
    type_name: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        """As messages have it: ``layer1.conv:output``, ``layer1.conv.weight:parameter_grad``."""
        if self.port in ("parameter", "parameter_grad", "update"):
            return f"{self.path}.{self.place}:{self.port}" if self.path else f"{self.place}:{self.port}"
        return f"{label(self.path)}:{self.port}{self.place}"


@dataclasses.dataclass(eq=False)
class Frame:
    """What one step gave.

    Attributes:
        step: Its number.
        time: When it ended, in seconds since 1970.
        series: Which series each row is about, int32, shape (rows,).
        call: Of which call of the module in this step, int32, shape (rows,).
        values: float64, shape (rows, fields), in the order in which they came; columns are ``FIELDS``.
        extra: What else is known, for JSON: learning rate, scale of the gradients, skipped step.
    """

    step: int
    time: float
    series: npt.NDArray[np.int32]
    call: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def rms(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Root mean square of the finite elements, of rows with ``FIELDS`` along the last axis; NaN where there is none."""
    finite = values[..., _COLUMN["numel"]] - values[..., _COLUMN["nan"]] - values[..., _COLUMN["inf"]]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(finite > 0, values[..., _COLUMN["l2"]] / np.sqrt(finite), np.nan)


def absmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Largest finite magnitude, of rows with ``FIELDS`` along the last axis; NaN where there is none."""
    return np.maximum(np.abs(values[..., _COLUMN["min"]]), np.abs(values[..., _COLUMN["max"]]))
