"""Bulk arrays beside messages: raw little-endian frames, never copied into the MessagePack map.

Invariant: a decoded array is a read-only memoryview cast to its element type, so `len` and slices count elements.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    Array = array.array[Any] | memoryview[Any]
else:
    Array = array.array | memoryview

TYPECODES: Final = {"i32": "i", "f32": "f", "i8": "b", "u8": "B"}
ITEMSIZES: Final = {"i32": 4, "f32": 4, "i8": 1, "u8": 1}

if sys.byteorder != "little":
    raise ImportError("gyre's wire format is little-endian and this machine is not")


def i32(values: Iterable[int] = ()) -> array.array[int]:
    return array.array("i", values)


def f32(values: Iterable[float] = ()) -> array.array[float]:
    return array.array("f", values)


def view(frame: bytes | bytearray | memoryview, dtype: str) -> memoryview[Any]:
    """A frame as elements of `dtype`. Raises ValueError when its size is no multiple of the element's."""
    raw = memoryview(frame).toreadonly().cast("B")
    if len(raw) % ITEMSIZES[dtype]:
        raise ValueError(f"{len(raw)} bytes are no whole number of {dtype}")
    return raw.cast(TYPECODES[dtype])  # type: ignore[call-overload,no-any-return]


def raw(values: Array, dtype: str) -> memoryview[int]:
    """Elements as bytes for the wire, without a copy. Raises TypeError when the element type differs."""
    v = memoryview(values)
    if v.format not in (TYPECODES[dtype], "<" + TYPECODES[dtype]) or not v.c_contiguous:
        raise TypeError(f"expected contiguous {dtype}, got format {v.format!r}")
    return v.cast("B")
