"""Metadata of dataclass fields makes the flags that transformers' parser makes of it, or is refused."""

from dataclasses import MISSING, field, make_dataclass
from typing import Literal, Optional

import pytest
from transformers import HfArgumentParser

from tr_args import ArgumentParser, ArgumentsError


def build(hint, default, metadata):
    given = {} if default is MISSING else {"default_factory": list} if default == [] else {"default": default}
    return make_dataclass("One", [("x", hint, field(metadata=metadata, **given))])


def outcome(parser, kind, line):
    """Return what a line gives, or `refused`."""
    try:
        (given,) = parser(kind).parse_args_into_dataclasses(line.split(), look_for_args_file=False)
    except (SystemExit, ArgumentsError, ValueError):
        return "refused"
    return given.x


TABLE = [
    (str, MISSING, {"nargs": "+"}, ["--x a", "--x a b", "--x", ""]),
    (str, "d", {"nargs": "+"}, ["--x a", "--x a b", "--x", ""]),
    (str, None, {"nargs": "*"}, ["--x a", "--x a b", "--x", ""]),
    (Optional[int], None, {"nargs": "*"}, ["--x 1", "--x 1 2", "--x", "--x a", ""]),  # noqa: UP045
    (list[str], [], {"nargs": "+"}, ["--x a b", "--x", ""]),
    (str, "d", {"nargs": "?"}, ["--x a", "--x", ""]),
    (str, "d", {"nargs": "?", "const": "k"}, ["--x a", "--x", ""]),
    (int, 3, {"nargs": "?", "const": 7}, ["--x 4", "--x", "--x a", ""]),
    (int, None, {"nargs": 2}, ["--x 1 2", "--x 1", "--x 1 2 3", ""]),
    (str, None, {"nargs": 1}, ["--x a", "--x", ""]),
    (bool, False, {"nargs": "?", "const": True}, ["--x", "--x true", ""]),
    (str, "d", {"metavar": "FILE"}, ["--x a", ""]),
    (int, 3, {"type": int}, ["--x 4", ""]),
    (int, 3, {"type": str}, ["--x 4", ""]),
    (str, None, {"action": "append"}, ["--x a", "--x a --x b", ""]),
    (int, None, {"action": "append"}, ["--x 1 --x 2", "--x a"]),
    (list[str], [], {"action": "extend"}, ["--x a b --x c", "--x=a --x=b", ""]),
    (str, None, {"action": "extend", "nargs": "+"}, ["--x a b --x c", ""]),
    (str, "d", {"required": True}, ["--x a", ""]),
    (str, "d", {"required": False}, ["--x a", ""]),
    (str, MISSING, {"nargs": "+", "choices": ["a", "b"]}, ["--x a b", "--x a z"]),
    (Literal["a", "b"], "a", {"nargs": "+"}, ["--x a b", "--x c", ""]),
    (str, "d", {"const": "k"}, ["--x a"]),
]


@pytest.mark.parametrize(
    ("hint", "default", "metadata", "lines"),
    TABLE,
    ids=[f"{number}: {hint}" for number, (hint, *_) in enumerate(TABLE)],
)
def test_a_line_gives_what_it_gives_there(hint, default, metadata, lines):
    for line in lines:
        kinds = [build(hint, default, metadata) for _ in range(2)]  # transformers' parser changes the fields' types
        assert outcome(ArgumentParser, kinds[0], line) == outcome(HfArgumentParser, kinds[1], line), line


@pytest.mark.parametrize("metadata", [{"nargz": "+"}, {"action": "store_false"}, {"nargs": "?", "size": 3}], ids=str)
def test_what_cannot_be_built_there_is_refused_in_words(metadata):
    with pytest.raises(TypeError):
        HfArgumentParser(build(bool, True, metadata))
    with pytest.raises(ValueError, match="metadata of fields"):
        ArgumentParser(build(bool, True, metadata))


@pytest.mark.parametrize(
    ("hint", "default", "metadata", "line", "there", "here"),
    [
        (list[str], [], {"nargs": "*"}, "--x", "refused", []),
        (str, "d", {"type": str.lower}, "--x AB", "AB", "ab"),
    ],
)
def test_a_setting_that_is_dropped_there_acts(hint, default, metadata, line, there, here):
    assert outcome(HfArgumentParser, build(hint, default, metadata), line) == there
    assert outcome(ArgumentParser, build(hint, default, metadata), line) == here
