"""Rules of parameters come from code, files and command lines alike."""

import json

import pytest

from tr_args import ArgumentParser, TrainingArguments

RULES = [
    {"params": r"encoder\..*", "learning_rate": 1e-5, "weight_decay": 0.0, "lr_scale": 0.1},
    {"params": ["head", "pooler"], "name": "top", "betas": [0.9, 0.95]},
]


def parse(*words):
    return ArgumentParser(TrainingArguments).parse_args_into_dataclasses(list(words))[0].parameter_rules


def test_rules_are_the_same_wherever_they_come_from(tmp_path):
    text = [json.dumps(rule) for rule in RULES]
    (tmp_path / "config.yaml").write_text(
        "parameter_rules:\n"
        "  - {params: 'encoder\\..*', learning_rate: 1e-5, weight_decay: 0, lr_scale: '0.1'}\n"
        "  - params: [head, pooler]\n    name: top\n    betas: [0.9, 0.95]\n"
    )
    (tmp_path / "config.json").write_text(json.dumps({"parameter_rules": RULES}))
    assert TrainingArguments(parameter_rules=RULES).parameter_rules == RULES
    assert parse("--parameter_rules", json.dumps(RULES)) == RULES
    assert parse("--parameter_rules", *text) == RULES
    assert parse("--config", str(tmp_path / "config.yaml")) == RULES
    assert parse("--config", str(tmp_path / "config.json")) == RULES


def test_one_rule_needs_no_list():
    assert TrainingArguments(parameter_rules=RULES[0]).parameter_rules == RULES[:1]
    assert parse("--parameter_rules", json.dumps(RULES[0])) == RULES[:1]


def test_numbers_of_a_rule_are_numbers():
    (rule,) = TrainingArguments(
        parameter_rules=[{"params": "a", "learning_rate": "1e-4", "lr_scale": 2}]
    ).parameter_rules
    assert (rule["learning_rate"], rule["lr_scale"]) == (1e-4, 2.0)
    assert isinstance(rule["lr_scale"], float)


@pytest.mark.parametrize("given", [None, []])
def test_there_need_be_no_rules(given):
    assert not TrainingArguments(parameter_rules=given).parameter_rules


def test_rules_are_written_and_read_again():
    args = TrainingArguments(parameter_rules=RULES)
    assert TrainingArguments.from_dict(json.loads(args.to_json_string())).parameter_rules == RULES
