"""Ways to damage a file: cut, flipped, spliced, with huge numbers, deeply nested; by a random generator with a seed."""

from __future__ import annotations

import json
from random import Random
from typing import Any

NUMBERS = (b"-1", b"0", b"18446744073709551616", b"1e39", b"-1e308", b"1e999", b"inf", b"NaN", b"9" * 5000, b"0x7f", b"-0.0")
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 0.5, -1.5, 1e308, float("inf"), float("nan")),
    *("", "x", "\0", "\ud800", "a\nb", "../../x", "é" * 300, [], {}, [[]], [None], {"": 0}, ["x", 1], [1, 2, 3]),
)
DEEP = 100_000


def damaged(random: Random, content: bytes) -> bytes:
    """`content` with one to three injuries."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = random.choice((_cut, _flipped, _flipped, _spliced, _numbered, _overwritten, _nested, _doubled))(random, content)
    return content


def _place(random: Random, content: bytes) -> int:
    # Heads of files are worth more blows than their bodies.
    return random.randrange(min(len(content), 256) + 1) if random.random() < 0.5 else random.randrange(len(content) + 1)


def _cut(random: Random, content: bytes) -> bytes:
    return content[: _place(random, content)]


def _flipped(random: Random, content: bytes) -> bytes:
    made = bytearray(content or b"\0")
    for _ in range(random.choice((1, 1, 4, 32))):
        made[min(_place(random, content), len(made) - 1)] ^= 1 << random.randrange(8)
    return bytes(made)


def _spliced(random: Random, content: bytes) -> bytes:
    first, second = sorted((_place(random, content), _place(random, content)))
    at = _place(random, content)
    return content[:at] + content[first:second] + content[at + random.choice((0, second - first)) :]


def _numbered(random: Random, content: bytes) -> bytes:
    """A number, or a few random bytes, put over another."""
    at = _place(random, content)
    digits = [place for place in range(at, min(at + 400, len(content))) if content[place : place + 1].isdigit()]
    at = digits[0] if digits and random.random() < 0.8 else at
    end = at
    while end < len(content) and content[end : end + 1].isdigit():
        end += 1
    return content[:at] + random.choice(NUMBERS) + content[end:]


def _overwritten(random: Random, content: bytes) -> bytes:
    at, count = _place(random, content), random.choice((1, 4, 8, 100))
    put = random.choice((bytes(count), b"\xff" * count, random.randbytes(count), b"\x80" + bytes(count)))
    return content[:at] + put + content[at + len(put) :]


def _nested(random: Random, content: bytes) -> bytes:
    at = _place(random, content)
    return content[:at] + random.choice((b"[", b"{", b'{"a":', b"(", b'"')) * random.choice((2, 70, 1500, DEEP)) + content[at:]


def _doubled(random: Random, content: bytes) -> bytes:
    return content * random.choice((2, 3, 50))


def damaged_json(random: Random, content: bytes) -> bytes:
    """`content`, a document, with one to three of its values or names changed; now and then damaged as bytes."""
    if random.random() < 0.3:
        return damaged(random, content)
    found = [json.loads(content)]
    for _ in range(random.choice((1, 1, 2, 3))):
        holder: Any = found
        while True:
            places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            at = random.choice(places)
            inner = holder[at]
            if not isinstance(inner, dict | list) or not inner or random.random() < 0.2:
                break
            holder = inner
        match random.randrange(5):
            case 0 if holder is not found:
                del holder[at]
            case 1 if isinstance(holder, dict):
                holder[random.choice(("x", "", "__class__", "sections"))] = holder.pop(at)
            case 2 if holder is not found:
                holder[at] = [[inner] * 3, {"a": inner}][random.randrange(2)]
            case _:
                holder[at] = random.choice(VALUES)
        if not isinstance(found[0], dict | list) or not found[0]:
            break
    return json.dumps(found[0], indent=random.choice((None, 1))).encode()
