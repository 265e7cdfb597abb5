"""Change bytes at random: the same change for the same number."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_NUMBERS = (
    b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"4294967295", b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551616", b"-9223372036854775809", b"1000000000000", b"1e308", b"1e999", b"-0.0", b"NaN",
    b"Infinity",    b"9" * 5000, b"null", b"true", b'""', b"[]", b"{}",
)  # fmt: skip
_DIGITS = re.compile(rb"-?\d+")
_WIDE = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\xff" * 8, b"\x00" * 8)


def mutated(number: int, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """Return one of `seeds` with one to six changes.

    Args:
        number: which change; the same bytes come of the same number.
        seeds: what is changed.
        tokens: what means something where these are read, to be put in.
    """
    draw = random.Random(number)
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        _CHANGES[draw.randrange(len(_CHANGES))](data, draw, seeds, tokens)
    return bytes(data[:2_000_000])


def _place(data: bytearray, draw: random.Random) -> tuple[int, int]:
    start = draw.randrange(len(data) + 1)
    return start, min(len(data), start + draw.choice((1, 1, 2, 4, 8, 16, 64, 256)))


def _flip(data: bytearray, draw: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _replace(data: bytearray, draw: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))


def _remove(data: bytearray, draw: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    start, end = _place(data, draw)
    del data[start:end]


def _cut(data: bytearray, draw: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    del data[draw.randrange(len(data) + 1) :]


def _repeat(data: bytearray, draw: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    start, end = _place(data, draw)
    times = draw.choice((1, 1, 1, 2, 10, 1000))
    data[start:start] = bytes(data[start:end]) * times


def _token(data: bytearray, draw: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    start, end = _place(data, draw)
    data[start : draw.choice((start, end))] = draw.choice(tokens)


def _number(data: bytearray, draw: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    start = draw.randrange(len(data) + 1)
    if found := _DIGITS.search(data, start):
        data[found.start() : found.end()] = draw.choice(_NUMBERS)


def _wide(data: bytearray, draw: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    start = draw.randrange(len(data) + 1)
    value = draw.choice(_WIDE)
    data[start : start + len(value)] = value


def _splice(data: bytearray, draw: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    other = draw.choice(seeds)
    start = draw.randrange(len(other) + 1)
    place, end = _place(data, draw)
    data[place:end] = other[start : start + draw.choice((4, 16, 64, 512))]


_CHANGES = (_flip, _replace, _remove, _cut, _repeat, _token, _token, _number, _number, _wide, _splice)
