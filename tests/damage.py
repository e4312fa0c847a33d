"""Bytes with changes of many kinds, as a damaged file may have them."""

from __future__ import annotations

import random
import re

__all__ = ["NUMBERS", "mutated"]

# What damage may make of a number in a header.
NUMBERS = (
    *("0", "1", "2", "3", "5", "-1", "40", "42", "0.5", "-0.0", "1e9", "1e-300"),
    *(str(2**power) for power in (31, 53, 62, 63, 64)),
    "9" * 40,
)
_WORDS = (
    *(b"null", b"true", b"[]", b"{}", b'""', b'"', b"}", b"NaN", b"1L", b"1e999", b"\\", b"[[[["),
    *(b"\x00", b"\x80", b"\xff\xff\xff\xff"),
)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The bytes with one to four changes."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        edge = min(len(data), 300)  # headers are at the beginning or at the end
        last = len(data) - 1
        at = chance.choice((chance.randrange(len(data)), chance.randrange(edge), last - chance.randrange(edge)))
        length = chance.choice((1, 2, 4, 8, 30))
        match chance.randrange(9):
            case 0 | 1:
                data[at] ^= 1 << chance.randrange(8)
            case 2:
                data[at] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
            case 3:
                data[at : at + length] = chance.randbytes(length)
            case 4:
                data[at:at] = chance.choice((chance.randbytes(length), chance.choice(_WORDS)))
            case 5:
                del data[at : at + length]
            case 6:
                del data[at:]
            case 7:
                source = chance.randrange(len(data))
                data[at : at + length] = data[source : source + chance.choice((length, 100))]
            case _:
                runs = list(re.finditer(rb"[0-9]+", data))
                if runs:
                    run = chance.choice(runs)
                    data[run.start() : run.end()] = chance.choice(NUMBERS).encode()
    return bytes(data)
