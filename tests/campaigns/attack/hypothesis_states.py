"""Names and states of every shape: a name is that of a file inside or refused, a state comes back as it was."""

from __future__ import annotations

import math
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from runner import OUTSIDE, WRONG_END, Tally

from tr_ckpt import CheckpointError
from tr_ckpt.testing import is_allowed_name, read_part, write_part

_STEPS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["..", ".", "", "a", "A", "nul", "con.txt", "x.", "C:", "\\", "\0", "é", "e\u0301", "\ud800", "a" * 300]
    ),
)
NAMES = st.one_of(st.text(), st.lists(_STEPS, max_size=5).map("/".join), st.lists(_STEPS, max_size=3).map("\\".join))

_KEYS = st.one_of(
    st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.tuples(st.integers(), st.text())
)
_TENSORS = st.tuples(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]),
    st.lists(st.integers(0, 3), max_size=3),
).map(lambda made: torch.ones(made[1]).to(made[0]))
_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), _TENSORS,
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([1, 0]), 2**80, -(2**63), math.inf]),
)  # fmt: skip
STATES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.dictionaries(st.text(), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=25,
)


def names(number: int, seed: int) -> Tally:
    """Draw names, and make a file of each that is taken."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as held:
        inside = Path(held).resolve() / "inside"

        def judge(name: str) -> None:
            tally.tried += 1
            if not is_allowed_name(name):
                tally.ends["refused"] += 1
                return
            tally.ends["inside"] += 1
            place = inside / name
            windows = PureWindowsPath("C:/inside", name)
            if not place.resolve().is_relative_to(inside) or place == inside or "C:\\inside\\" not in f"{windows}":
                tally.wrong(OUTSIDE, f"{name!r} leads outside")
            if windows.is_reserved() or any(part in ("..", ".") for part in windows.parts):
                tally.wrong(OUTSIDE, f"{name!r} leads elsewhere on Windows")
            if tally.tried % 10 == 0:
                made = (
                    inside / str(tally.tried) / name
                )  # each beside the others: one may be a file, and another's folder
                made.parent.mkdir(parents=True)
                made.write_bytes(b"")

        _draw(NAMES, judge, number, seed)
    return tally


def states(number: int, seed: int) -> Tally:
    """Draw states, and save and read each."""
    tally = Tally()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as held:

        def judge(state: Any) -> None:
            tally.tried += 1
            folder = Path(held) / str(tally.tried)
            folder.mkdir()
            try:
                write_part(folder, "part", state)
            except CheckpointError:
                tally.ends["refused"] += 1
                return
            back = read_part(folder, "part")
            if not same(state, back):
                tally.wrong(WRONG_END, f"{state!r:.300} became {back!r:.300}")
            tally.ends["came back"] += 1

        _draw(STATES, judge, number, seed)
    return tally


def _draw(strategy: Any, judge: Callable[[Any], None], number: int, seed: int) -> None:
    import hypothesis

    checks = list(HealthCheck)
    options = settings(
        max_examples=number, database=None, deadline=None, suppress_health_check=checks, phases=[Phase.generate]
    )
    hypothesis.seed(seed)(options(given(strategy)(judge)))()


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, kinds and order and NaN included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(mine, theirs) and same(one[mine], other[theirs])
            for mine, theirs in zip(_order(one), _order(other), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and one != one and other != other)


def _order(held: dict) -> list:
    # Of plain JSON the keys are sorted.
    is_plain = type(held) is dict and all(type(key) is str for key in held)
    return sorted(held) if is_plain else list(held)
