"""Programs that know a parser of argparse only can read the fields' actions and change their defaults."""

import argparse
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import pytest

from tr_args import ArgumentParser, TrainingArguments


class Colour(Enum):
    RED = "red"
    SEVEN = 7


@dataclass
class Everything:
    number: int
    some_words: list[str] = field(default_factory=lambda: ["a"], metadata={"help": "100% words", "aliases": ["-w"]})
    colour: Colour = "red"
    choice: Literal["one", 2] | None = None
    on: bool = True
    off: bool = False
    maybe: bool | None = None

    def __post_init__(self):
        self.colour = Colour(self.colour)


def actions(parser):
    return {action.dest: action for action in reversed(parser._actions)}


def test_fields_are_actions_as_argparse_has_them():
    found = actions(ArgumentParser(Everything))
    assert list(found) == ["maybe", "off", "on", "choice", "colour", "some_words", "number", "help"]
    assert (found["number"].type, found["number"].required, found["number"].default) == (int, True, None)
    words = found["some_words"]
    assert words.option_strings == ["--some_words", "--some-words", "-w"]
    assert (words.nargs, words.type, words.default, words.help) == ("+", str, ["a"], "100% words")
    assert (found["colour"].choices, found["choice"].choices) == (["red", 7], ("one", 2))
    assert (found["colour"].type("7"), found["choice"].type("2")) == (7, 2)
    assert (found["on"].nargs, found["on"].const, found["maybe"].nargs) == ("?", True, None)
    assert found["off"].type("yes") is True


def test_a_switch_that_is_on_has_an_action_that_turns_it_off():
    negated = [action for action in ArgumentParser(Everything)._actions if action.dest in ("on", "off")]
    assert [action.option_strings for action in negated] == [["--on"], ["--no_on", "--no-on"], ["--off"]]


def test_set_defaults_comes_before_files_and_the_command_line(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"seed": 2, "logging_steps": 5}')
    parser = ArgumentParser(TrainingArguments)
    parser.add_argument("--mine", default=1, type=int)
    parser.set_defaults(seed=1, learning_rate="1e-3", logging_steps=4, mine=7, spare=3)
    assert parser.get_default("learning_rate") == "1e-3"
    args, extra = parser.parse_args_into_dataclasses(["--config", str(path), "--seed", "3"])
    assert (args.seed, args.learning_rate, args.logging_steps) == (3, 1e-3, 5)
    assert vars(extra) == {"mine": 7, "spare": 3}
    assert parser.origins["learning_rate"] == "set_defaults"


def test_a_default_that_is_assigned_to_an_action_counts_and_one_that_is_not_does_not():
    parser = ArgumentParser(Everything)
    for action in parser._actions:
        if action.dest == "number":
            action.default, action.required = 4, False
    (args,) = parser.parse_args_into_dataclasses([])
    assert (args.number, args.some_words, args.colour) == (4, ["a"], Colour.RED)
    assert set(parser.origins) == {"number"}
    parser.set_defaults(number="x")
    with pytest.raises(ValueError, match=r"number = 'x' \(set_defaults\): needs a whole number"):
        parser.parse_args_into_dataclasses([])


def test_plain_parse_args_gives_what_the_constructor_would_be_given():
    parser = ArgumentParser(Everything)
    space = parser.parse_args(["--number", "1", "--colour", "7", "--choice", "2", "--no_on"])
    assert space == argparse.Namespace(number=1, some_words=["a"], colour=7, choice=2, on=False, off=False, maybe=None)
    assert parser.parse_args(["--number", "1"]).colour == "red"


def test_plain_parse_args_names_every_problem(capsys):
    with pytest.raises(SystemExit):
        ArgumentParser((Everything, TrainingArguments)).parse_args(["--off", "--choice", "3", "--seed", "x"])
    said = capsys.readouterr().err
    assert "choice = '3'" in said
    assert "number is missing" in said
    assert "seed = 'x'" in said


def test_a_parser_of_argparse_reads_the_fields_of_one_that_is_its_parent():
    @dataclass
    class Collected:
        many: str | None = field(default=None, metadata={"action": "append"})
        more: list[str] = field(default_factory=list, metadata={"action": "extend"})

    parent = ArgumentParser((Everything, Collected), add_help=False)
    line = "--number 1 -w b c --no-on --off --choice 2 --many a --many b --more a b --more c"
    space = argparse.ArgumentParser(parents=[parent]).parse_args(line.split())
    assert (space.number, space.some_words, space.on, space.off, space.choice) == (1, ["b", "c"], False, True, 2)
    assert (space.many, space.more, space.colour) == (["a", "b"], ["a", "b", "c"], "red")
    with pytest.raises(SystemExit):
        argparse.ArgumentParser(parents=[parent]).parse_args(["--number", "x"])


def test_usage_and_help_are_as_before_and_abbreviations_stay_off():
    parser = ArgumentParser(Everything, prog="run", allow_abbrev=True)
    parser.add_argument("data")
    assert parser.format_usage() == "usage: run [-h] data\n"
    assert parser.format_help().count("--some_words") == 1
    assert parser.parse_known_args(["here", "--numb", "1", "--number", "2"])[1] == ["--numb", "1"]
