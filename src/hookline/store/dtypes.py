"""How each dtype and shape lies in a safetensors file. No torch in here."""

from __future__ import annotations

import dataclasses
from typing import Any

from hookline.store.strict_json import LARGEST, fault, show


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a dtype lies in a safetensors file.

    Attributes:
        code: dtype in the header of the file.
        itemsize: Bytes of one element of the true dtype.
        parts: Elements of the file's dtype that make one; above 1 they are one more axis at the end of the shape.
    """

    code: str
    itemsize: int
    parts: int = 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that stands in the header of the file."""
        return shape if self.parts == 1 else (*shape, self.parts)


STORAGE: dict[str, Storage] = {
    "bool": Storage("BOOL", 1),
    "uint8": Storage("U8", 1),
    "uint16": Storage("U16", 2),
    "uint32": Storage("U32", 4),
    "uint64": Storage("U64", 8),
    "int8": Storage("I8", 1),
    "int16": Storage("I16", 2),
    "int32": Storage("I32", 4),
    "int64": Storage("I64", 8),
    "float16": Storage("F16", 2),
    "bfloat16": Storage("BF16", 2),
    "float32": Storage("F32", 4),
    "float64": Storage("F64", 8),
    "float8_e4m3fn": Storage("F8_E4M3", 1),
    "float8_e5m2": Storage("F8_E5M2", 1),
    # The rest is stored as what it is made of: safetensors has no name for it, or only lately has one, and a reader
    # refuses a whole file for one name that it does not know
    "float8_e4m3fnuz": Storage("U8", 1),
    "float8_e5m2fnuz": Storage("U8", 1),
    "float8_e8m0fnu": Storage("U8", 1),
    "complex32": Storage("F16", 4, parts=2),
    "complex64": Storage("F32", 8, parts=2),
    "complex128": Storage("F64", 16, parts=2),
    "float4_e2m1fn_x2": Storage("U8", 1),
    "bits16": Storage("U16", 2),
    **{name: Storage("U8", 1) for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")},
    **{f"{sign}int{bits}": Storage("U8", 1) for sign in ("", "u") for bits in range(1, 8)},
}
"""By the name of the dtype in torch, without ``torch.``"""

CODE_SIZE: dict[str, int] = {storage.code: storage.itemsize // storage.parts for storage in STORAGE.values()}
"""Bytes of one element of each dtype that can stand in the header of a shard."""


def parse_shape(shape: Any, itemsize: int, place: object) -> tuple[int, ...]:
    """A shape whose strides and size in bytes are numbers that torch can hold.

    Raises:
        FormatError: It is not a list of such numbers.
    """
    total = itemsize
    for size in shape if type(shape) is list else (None,):
        if type(size) is not int or size < 0:
            raise fault(place, f'"shape" has to be a list of whole numbers from 0 on, it has {show(size)}')
        total *= size or 1
        if total > LARGEST:
            raise fault(place, '"shape" is larger than any memory')
    return tuple(shape)
