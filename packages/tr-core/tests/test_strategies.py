"""Choose a strategy by what the arguments say about the model and the launcher about processes."""

import pytest

from tr_args import TrainingArguments
from tr_core import plugins
from tr_core.choose_strategy import choose_strategy, usable_strategy

ZERO = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("options", "processes", "name"),
    [
        ({}, 1, "single"),
        ({}, 2, "ddp"),
        ({"fsdp": "full_shard"}, 2, "fsdp"),
        ({"deepspeed": ZERO}, 2, "deepspeed"),
        ({"deepspeed": ZERO}, 1, "deepspeed"),
        ({"deepspeed": ZERO, "strategy": "deepspeed"}, 2, "deepspeed"),
        ({"strategy": "ddp"}, 1, "ddp"),
    ],
)
def test_arguments_and_launcher_decide(tmp_path, monkeypatch, options, processes, name):
    monkeypatch.setattr(plugins, "load", lambda group, asked: lambda args: (group, asked))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert choose_strategy(args) == ("tr.strategies", name)


def test_one_of_several_processes_does_not_train_alone(tmp_path, monkeypatch):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, strategy="single")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="would train 2 unrelated models"):
        usable_strategy(args)
