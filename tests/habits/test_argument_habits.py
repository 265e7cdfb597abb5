"""Arguments that users copy, share, change between runs, misspell, and change after a Trainer was built."""

import copy
import dataclasses
import pickle

import pytest
import torch
from habit_parts import RATE, Net, assert_same, batches, by_hand, logged, rows, stack, when

from tr_core import TrainingArguments

# Changed between runs


def test_a_rate_changed_between_two_runs_is_that_of_the_second(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.train()
    trainer.args.learning_rate = 0.01
    trainer.train()
    by_hand(other, batches(rows()))
    by_hand(other, batches(rows()), rate=0.01)
    assert logged(trainer, "learning_rate") == pytest.approx([0.01] * 4)
    assert_same(trainer.model, other)


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


def test_intervals_changed_between_two_runs_are_those_of_the_second(make_trainer):
    trainer = make_trainer()
    trainer.train()
    trainer.args.logging_steps = 2
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [2, 4]


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


def test_the_batch_size_of_evaluations_changed_before_one_is_used(make_trainer):
    sizes = []
    trainer = make_trainer(eval_dataset=rows(8))
    trainer.model.register_forward_pre_hook(lambda module, _, given: sizes.append(len(given["x"])), with_kwargs=True)
    trainer.args.per_device_eval_batch_size = 8
    trainer.evaluate()
    assert sizes == [8]


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


def test_evaluations_asked_for_after_construction_without_data_are_refused(make_trainer):
    trainer = make_trainer()
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2
    with pytest.raises(ValueError, match="eval_dataset"):
        trainer.train()


def test_label_smoothing_set_after_construction_acts(make_trainer):
    class Classes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x, labels=None):
            logits = self.layer(x)
            if labels is None:
                return {"logits": logits}
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": row["x"], "labels": torch.tensor(number % 3)} for number, row in enumerate(rows())]
    trainer = make_trainer(model=Classes(), train_dataset=data)
    trainer.args.label_smoothing_factor = 0.2
    trainer.train()
    other = Classes()

    def smoothed(model, batch):
        return torch.nn.functional.cross_entropy(model.layer(batch["x"]), batch["labels"], label_smoothing=0.2)

    assert logged(trainer) == pytest.approx(by_hand(other, batches(data), loss=smoothed))


@pytest.mark.parametrize(
    ("name", "value"), [("bf16", True), ("use_cpu", False), ("strategy", "ddp"), ("report_to", ["jsonl"])]
)
def test_what_the_trainer_was_built_by_changed_afterwards_is_refused(make_trainer, name, value):
    trainer = make_trainer(report_to="none")
    setattr(trainer.args, name, value)
    with pytest.raises(ValueError, match=rf"that a Trainer reads when it is built: {name} from .*build a new Trainer"):
        trainer.train()


# Other arguments


def test_other_arguments_set_on_the_trainer_before_training_are_used(make_trainer, make_args):
    trainer, other = make_trainer(), Net()
    trainer.args = make_args(learning_rate=0.3, max_steps=2)
    trainer.train()
    by_hand(other, batches(rows())[:2], rate=0.3)
    assert trainer.state.global_step == 2
    assert_same(trainer.model, other)


def test_arguments_replaced_by_a_changed_copy_are_used(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.args = dataclasses.replace(trainer.args, learning_rate=0.3)
    trainer.train()
    by_hand(other, batches(rows()), rate=0.3)
    assert_same(trainer.model, other)


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args)), dataclasses.replace]
)
def test_copies_of_arguments_are_equal_and_apart(make_args, way):
    args = make_args(lr_scheduler_kwargs={"a": 1})
    double = way(args)
    assert double.to_dict() == args.to_dict()
    double.learning_rate = 0.7
    assert args.learning_rate == RATE


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


# Misspelt and impossible


def test_a_misspelt_argument_that_is_set_is_refused(make_args):
    args = make_args()
    with pytest.raises(ValueError, match=r"learning_rte.*did you mean.*learning_rate"):
        args.learning_rte = 1.0


def test_an_attribute_of_ones_own_may_be_set_on_arguments(make_args):
    args = make_args()
    args.my_temperature = 2.0
    assert copy.deepcopy(args).my_temperature == 2.0


def test_a_misspelt_argument_that_is_given_is_refused(make_args):
    with pytest.raises((TypeError, ValueError), match=r"learning_rte.*did you mean.*learning_rate"):
        make_args(learning_rte=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("per_device_train_batch_size", 0), ("logging_steps", -1), ("lr_scheduler_type", "linaer"), ("optim", "adamm")],
)
def test_impossible_values_set_after_construction_are_refused(make_trainer, name, value):
    trainer = make_trainer()

    def change_and_train():
        setattr(trainer.args, name, value)
        trainer.train()

    with pytest.raises((TypeError, ValueError, ImportError), match=rf"{name}|{value}"):
        change_and_train()


def test_numbers_given_as_texts_are_numbers(make_trainer):
    trainer, other = make_trainer(learning_rate="1e-1", max_steps="4"), Net()
    trainer.train()
    by_hand(other, batches(rows()))
    assert_same(trainer.model, other)


def test_a_former_name_set_on_arguments_is_the_argument(make_args):
    args = make_args()
    args.evaluation_strategy = "epoch"
    assert args.eval_strategy == "epoch"
