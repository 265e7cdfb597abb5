"""Settings of argparse in a field's metadata act as they do there, or are refused when the parser is built."""

import argparse
import json
from dataclasses import MISSING, dataclass, field, make_dataclass
from typing import Annotated, Literal, Optional

import pytest

from tr_args import ArgumentParser, ArgumentsError, TrainingArguments, argument
from tr_args.constraints import AtLeast


def holding(hint, default=MISSING, *, factory=MISSING, **metadata):
    """Return a dataclass with one field, `x`."""
    kinds = {"default": default, "default_factory": factory}
    given = {key: value for key, value in kinds.items() if value is not MISSING}
    return make_dataclass("One", [("x", hint, field(metadata=metadata, **given))])


def parsed(kind, line):
    (given,) = ArgumentParser(kind).parse_args_into_dataclasses(line.split())
    return given.x


@pytest.mark.parametrize(
    ("kind", "line", "value"),
    [
        (holding(str, nargs="+"), "--x a", ["a"]),
        (holding(str, nargs="+"), "--x a b", ["a", "b"]),
        (holding(str, "d", nargs="+"), "", "d"),
        (holding(Optional[int], None, nargs="*"), "--x 1 2", [1, 2]),  # noqa: UP045
        (holding(Optional[int], None, nargs="*"), "--x", []),  # noqa: UP045
        (holding(list[str], factory=list, nargs="*"), "--x", []),
        (holding(int, None, nargs=2), "--x 1 2", [1, 2]),
        (holding(str, nargs=1), "--x a", ["a"]),
        (holding(Annotated[int, AtLeast(1)], nargs="+"), "--x 1 2", [1, 2]),
        (holding(str, "d", nargs="?"), "--x", None),
        (holding(int, 3, nargs="?", const=7), "--x", 7),
        (holding(int, 3, nargs="?", const=7), "--x 4", 4),
        (holding(int, 3, nargs="?", const=7), "", 3),
        (holding(bool, False, action="store_true"), "--x", True),
        (holding(bool, False, nargs="?", const=True), "--x", True),
        (holding(str, None, action="append"), "--x a --x b", ["a", "b"]),
        (holding(int, None, action="append"), "--x 1 --x=2", [1, 2]),
        (holding(list[str], factory=list, action="extend"), "--x a b --x c", ["a", "b", "c"]),
        (holding(str, None, nargs="+", action="extend"), "--x a b --x c", ["a", "b", "c"]),
        (holding(str, "d", type=str.lower), "--x AB", "ab"),
        (holding(str, nargs="+", type=str.lower), "--x A B", ["a", "b"]),
        (holding(dict, factory=dict, type=json.loads), '--x {"a":1}', {"a": 1}),
        (holding(int, 3, type=int, required=True), "--x 4", 4),
        (holding(str, nargs="+", choices=["a", "b"]), "--x a b", ["a", "b"]),
        (holding(Literal["a", "b"], "a", nargs="+"), "--x a b", ["a", "b"]),
    ],
)
def test_a_setting_acts(kind, line, value):
    assert parsed(kind, line) == value


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        (holding(str, "d", nargs="+"), "--x", "--x needs a value"),
        (holding(int, None, nargs=2), "--x 1", "needs 2 values, not 1"),
        (holding(int, None, nargs=2), "--x 1 2 3", "needs 2 values, not 3"),
        (holding(Annotated[int, AtLeast(1)], nargs="+"), "--x 1 0", "needs at least 1"),
        (holding(str, nargs="+", choices=["a", "b"]), "--x a z", "needs one of a, b"),
        (holding(str, "d", required=True), "", "x is missing; its metadata says required=True"),
        (holding(dict, factory=dict, type=json.loads), "--x {", r"x = '{' \(command line\): is not read by loads"),
    ],
)
def test_a_value_that_a_setting_does_not_allow_is_refused(kind, line, message):
    with pytest.raises(ArgumentsError, match=message):
        parsed(kind, line)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (holding(str, "d", nargz="+"), "One.x: 'nargz' is not known; did you mean nargs?"),
        (holding(str, "d", dest="y"), "dest='y' is not supported"),
        (make_dataclass("One", [("x", str, field(metadata={"default": "e"}))]), "default='e' is not the field's"),
        (holding(str, required=False), "required=False needs a default"),
        (holding(str, "d", metavar=3), "metavar=3 needs text"),
        (holding(str, "d", type="int"), "type='int' needs a function"),
        (holding(str, "d", type=int), "type=int is not what the field is annotated with"),
        (holding(str, "d", nargs=0), "nargs=0 is not supported"),
        (holding(str, "d", nargs=argparse.REMAINDER), "nargs='...' is not supported"),
        (holding(bool, False, nargs="+"), "annotate list[bool]"),
        (holding(list[str], factory=list, nargs="?"), "nargs='?' is not supported"),
        (holding(str, "d", const="k"), "const='k' is the value of the flag alone; needs nargs='?'"),
        (holding(bool, False, const=False), "const=False is not supported"),
        (holding(bool, True, action="store_true"), "action='store_true' needs a field that is bool"),
        (holding(bool, True, action="store_false"), "action='store_false' is not supported"),
        (holding(str, "d", action="append"), "needs a field without a default, or with an empty one; not 'd'"),
        (holding(list[str], factory=list, action="append"), "action='append' would make lists in a list"),
        (holding(str, None, action="extend"), "action='extend' needs nargs, or a field that is a list"),
    ],
)
def test_a_setting_that_a_field_cannot_have_is_refused_when_the_parser_is_built(kind, message):
    with pytest.raises(ValueError, match="metadata of fields") as caught:
        ArgumentParser(kind)
    assert message in str(caught.value)


def test_every_refused_setting_is_named_with_its_class_and_field():
    with pytest.raises(ValueError, match="metadata of fields") as caught:
        ArgumentParser([holding(str, "d", dest="y", size=1), TrainingArguments])
    assert str(caught.value).count("One.x: ") == 2


def test_a_file_gives_what_a_command_line_gives(tmp_path):
    kind = make_dataclass("Data", [("train_data", str, field(metadata={"nargs": "+", "type": str.lower}))])
    for text in ("train_data: A\n", "train_data: [A]\n"):
        (tmp_path / "data.yaml").write_text(text)
        assert ArgumentParser(kind).parse_yaml_file(tmp_path / "data.yaml")[0].train_data == ["a"]
    (given,) = ArgumentParser(kind, env_prefix="D_").parse_args_into_dataclasses(["--config", f"{tmp_path}/data.yaml"])
    assert given.train_data == ["a"]


def test_a_required_field_may_be_given_by_a_file_and_a_mapping_needs_no_more_than_a_constructor(tmp_path):
    kind = holding(str, "d", required=True)
    (tmp_path / "one.json").write_text('{"x": "a"}')
    assert parsed(kind, f"--config {tmp_path}/one.json") == "a"
    assert ArgumentParser(kind).parse_dict({})[0].x == "d"


def test_the_help_page_shows_them():
    fields = [
        ("data", str, field(metadata={"nargs": "+", "metavar": "FILE", "help": "Data."})),
        ("pair", int, argument(default=None, metadata={"nargs": 2, "metavar": ("LOW", "HIGH")})),
        ("level", int, field(default=3, metadata={"nargs": "?", "const": 7, "required": True})),
        ("fast", bool, field(default=False, metadata={"metavar": "YES"})),
        ("hidden", str, field(default="a", metadata={"help": argparse.SUPPRESS})),
    ]
    kind = make_dataclass("Shown", fields, namespace={"_argument_group_name": "What is shown"})
    parser = ArgumentParser(kind)
    page = " ".join(parser.format_help().split())
    for text in ("What is shown:", "--data FILE ... Data. (required)", "--pair LOW HIGH", "--level [INT] (required)"):
        assert text in page
    assert "--fast [YES], --no_fast" in page
    assert "hidden" not in page
    found = {action.dest: action for action in parser._actions if action.dest != "help"}
    assert (found["data"].nargs, found["data"].metavar, found["pair"].nargs) == ("+", "FILE", 2)
    assert (found["level"].nargs, found["level"].const, found["level"].required) == ("?", 7, True)


def test_a_subclass_of_training_arguments_takes_them_too():
    @dataclass
    class Own(TrainingArguments):
        train_data: str | None = field(default=None, metadata={"nargs": "+"})

    (args,) = ArgumentParser(Own).parse_args_into_dataclasses(["--train_data", "a", "b"])
    assert args.train_data == Own("out", train_data=["a", "b"]).train_data == ["a", "b"]
    assert Own("out", train_data="a").train_data == ["a"]
