"""The help page, and the list of flags that must not change by accident."""

import argparse
from dataclasses import fields
from pathlib import Path

from tr_args import ArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
from tr_args.flags import FlagTable
from tr_args.help_page import default_text, field_help
from tr_args.schema import schema

FROZEN = Path(__file__).parent / "flags.txt"


def lines():
    for name, option in sorted(FlagTable([Seq2SeqTrainingArguments]).options.items()):
        former = "" if option.spec.name == name else f" -> --{option.spec.name}"
        default = f" = {default_text(option)}" if default_text(option) and not former else ""
        yield f"--{name} {option.placeholder or '[BOOL]'}{default}{former}\n"


def test_the_list_of_flags_is_the_frozen_one():
    assert "".join(lines()) == FROZEN.read_text(), "if the change is meant, run `nox -s regen`"


def test_every_field_has_a_help_text():
    assert [name for name, spec in schema(Seq2SeqTrainingArguments).items() if not field_help(spec)] == []


def test_every_field_is_a_flag():
    table = FlagTable([Seq2SeqTrainingArguments])
    assert [f.name for f in fields(Seq2SeqTrainingArguments) if table.flag(f"--{f.name}") is None] == []


def test_the_help_page_is_grouped_by_topic_and_shows_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = ArgumentParser(Seq2SeqTrainingArguments, prog="train").format_help()
    assert page.startswith("usage: train [-h] [--config FILE] [--NAME VALUE ...]\n")
    topics = ["Output, length and batch size:", "Learning rate and optimizer:", "Evaluation:", "Hub:", "Generation:"]
    positions = [page.index(f"\n{topic}\n") for topic in topics]
    assert positions == sorted(positions)
    flat = " ".join(page.split())
    assert "--learning_rate NUMBER Peak learning rate, reached at the end of warmup. (default: 5e-05)" in flat
    assert "--eval_strategy no|steps|epoch|DURATION When to evaluate" in flat
    assert "--bf16, --no_bf16 Compute in bfloat16" in flat
    assert "--report_to TEXT ... Trackers to report to" in flat
    assert "Former names still accepted: --evaluation_strategy" in flat
    assert max(len(line) for line in page.splitlines()) <= 100


def test_the_help_page_works_with_argparse_s_formatter_that_adds_defaults():
    parser = ArgumentParser(TrainingArguments, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--mine", default=3, help="Added by hand.")
    page = " ".join(parser.format_help().split())
    assert "Added by hand. (default: 3)" in page
    assert page.count("(default: None)") == 0
    assert page.count("(default: 5e-05)") == 1


def test_the_help_of_fields_without_source_is_empty():
    space: dict = {}
    code = "from dataclasses import dataclass\n@dataclass\nclass Bare:\n    x: int = 1\n    '''Unseen.'''\n"
    exec(code, {"__name__": "nowhere"}, space)
    assert field_help(schema(space["Bare"])["x"]) == ""
