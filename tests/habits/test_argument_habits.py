"""Arguments that users copy, share, change between runs, misspell, and change after a Trainer was built."""

import copy
import dataclasses
import pickle

import pytest
import torch
from habit_parts import Net, assert_same, batches, by_hand, rows, stack, when

from tr_core import TrainingArguments

# Changed between runs


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"max_steps": 6}, 6),
        ({"max_steps": -1, "num_train_epochs": 2}, 8),
        ({"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 4}, 2),
        ({"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 4}, 1),
    ],
)
def test_the_length_of_a_second_run_is_that_of_the_arguments_as_they_are_then(make_trainer, changes, steps):
    trainer = make_trainer()
    trainer.train()
    for name, value in changes.items():
        setattr(trainer.args, name, value)
    trainer.train()
    assert trainer.state.global_step == steps


def test_the_seed_changed_between_two_runs_gives_another_order(make_trainer):
    seen = []
    note = when(on_micro_batch_end=lambda inputs, **_: seen.extend(inputs["labels"].tolist()))
    trainer = make_trainer(train_sampling_strategy="random", callbacks=[note])
    trainer.train()
    trainer.args.seed = 7
    trainer.train()
    assert sorted(seen[:8]) == pytest.approx(sorted(seen[8:]))
    assert seen[:8] != seen[8:]
    orders = [torch.randperm(8, generator=torch.Generator().manual_seed(seed)) for seed in (42, 7)]
    labels = stack(rows())["labels"]
    assert seen == pytest.approx([*labels[orders[0]].tolist(), *labels[orders[1]].tolist()])


def test_the_folder_changed_between_two_runs_is_where_the_second_saves(make_trainer, tmp_path):
    trainer = make_trainer(save_strategy="steps", save_steps=4)
    trainer.train()
    trainer.args.output_dir = str(tmp_path / "second")
    trainer.train()
    assert (tmp_path / "second" / "checkpoint-4").is_dir()


def test_evaluations_asked_for_after_construction_are_made(make_trainer):
    trainer = make_trainer(eval_dataset=rows(4))
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2, 4]


# Other arguments


def test_arguments_that_a_trainer_has_used_can_be_copied_and_pickled(make_trainer):
    trainer = make_trainer()
    trainer.train()
    for double in (copy.deepcopy(trainer.args), pickle.loads(pickle.dumps(trainer.args))):
        assert double.to_dict() == trainer.args.to_dict()


def test_one_object_of_arguments_serves_two_trainers(make_trainer, make_args):
    args, other = make_args(), Net()
    first, second = make_trainer(args=args), make_trainer(args=args)
    before = args.to_dict()
    first.train()
    second.train()
    by_hand(other, batches(rows()))
    assert_same(first.model, other)
    assert_same(second.model, other)
    assert args.to_dict() == before


def test_arguments_of_a_subclass_with_fields_of_its_own_are_there_in_callbacks(make_trainer, make_args):
    @dataclasses.dataclass
    class Own(TrainingArguments):
        temperature: float = 2.0

    seen = []
    note = when(on_step_end=lambda args, **_: seen.append(args.temperature))
    make_trainer(args=make_args(Own, temperature=3.0), callbacks=[note]).train()
    assert seen == [3.0] * 4
