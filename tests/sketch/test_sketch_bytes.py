"""Sketched rows as bytes.

Inside: bytes that no sketch writes are made by what packs them.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest

from levattn._core.serialize import pack, unpack
from levattn.sketch import (
    SketchedRows,
)


def sealed(header: bytes) -> bytes:
    """Bytes with a right checksum."""
    body = b"LEVATTN\0" + len(header).to_bytes(8, "little") + header
    return body + hashlib.blake2b(body, digest_size=32).digest()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04" + bytes(100), "data does not begin as a state of levattn does"),
        (b"LEVATTN\0" + bytes(100), "data is damaged or cut short"),
        (sealed(b"{}"), "data has no header that can be read"),
        (pack("Moments", 1, {}, {}), "data holds a 'Moments'; expected a SketchedRows"),
        (pack("SketchedRows", 2, {}, {}), "data is of version 2, which this levattn cannot read; expected 1"),
        (
            sealed(b'{"kind": "SketchedRows", "version": 1, "fields": {}, "arrays": [["sums", "<f8", [1]]]}'),
            "data does not fit its header",
        ),
    ],
)
def test_other_bytes_are_refused(data: bytes, message: str) -> None:
    """Damage of all kinds is in `tests/states/test_state_bytes.py`."""
    with pytest.raises(ValueError, match=f"^{message}"):
        SketchedRows.from_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        *({"distribution": value} for value in ("Unknown", "OSNAP", ["CountSketch"])),
        *({"parameters": value} for value in ({"size": 5, "block": 7}, 5)),
        {"next_row": 0.5},
        {"sums": np.zeros((1, 5, 3))},
        {"sums": np.zeros((1, 5, 2), np.float32)},
        {"sums": np.full((1, 5, 2), np.nan)},
        {"sums": None},
        {"seed": None},
    ],
    ids=str,
)
def test_fields_that_make_no_state_are_refused(change: dict[str, Any]) -> None:
    """A field of None is left out; other values are in `tests/states/test_state_bytes.py`."""
    fields = {"distribution": "CountSketch", "parameters": {"size": 5}, "seed": 0, "d": 2, "batch": [], "count": 9}
    whole = {**fields, "next_row": 9, "sums": np.zeros((1, 5, 2)), **change}
    made = {name: value for name, value in whole.items() if value is not None}
    sums = {"sums": made.pop("sums")} if "sums" in made else {}
    with pytest.raises(ValueError, match=r"^data holds "):
        SketchedRows.from_bytes(pack("SketchedRows", 1, made, sums))


def test_arrays_of_every_type_come_back() -> None:
    arrays: dict[str, Any] = {
        name: np.arange(6).reshape(2, 3).astype(name) for name in ("f8", "f4", "i8", "u8", "?", "u1", ">f8")
    }
    arrays |= {"empty": np.zeros((0, 4)), "strided": np.arange(12.0)[::2]}
    fields, found = unpack(pack("Thing", 3, {"a": [1, None, "x"]}, arrays), "Thing", 3)
    assert fields == {"a": [1, None, "x"]}
    for name, array in arrays.items():
        assert np.array_equal(found[name], array)
        assert found[name].dtype == array.dtype.newbyteorder("=")
        assert found[name].flags.writeable
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack("Thing", 3, {"a": math.nan}, {})
