"""What is changed after it was read acts from the next step, evaluation or save, or is refused."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from support.callbacks import At
from support.checkpointer import MemoryCheckpointer
from support.data import samples, stack
from support.models import Classifier
from support.runs import log_of, steps_with
from torch import nn

from tr_args.testing import Later, facts, facts_of_kind
from tr_core import Trainer, TrainingArguments
from tr_core.changes import TAKEN_AT_BEGIN

NAMES = sorted(field.name for field in dataclasses.fields(TrainingArguments))
LATER = facts_of_kind(TrainingArguments, Later)
DOCUMENT = Path(__file__).parents[1] / "docs" / "changing-a-run.md"


def change(name, value="another"):
    """Return what gives an argument another value, of whatever kind, as an assignment does."""

    def act(args):
        vars(args)[name] = value
        vars(args)["num_assignments"] = args.num_assignments + 1

    return act


def setting(**values):
    return lambda args: [setattr(args, name, value) for name, value in values.items()]


@pytest.mark.parametrize("name", [name for name in NAMES if LATER.get(name) in (None, Later.NEW_TRAINER)])
def test_an_argument_that_a_run_takes_when_it_begins_is_refused_in_its_middle(
    make_trainer, name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # what is logged in that step goes to the other folder
    trainer = make_trainer(16, callbacks=[At(2, change(name))])
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("name", facts(TrainingArguments, Later.NEW_TRAINER))
def test_an_argument_that_a_trainer_is_built_with_is_refused_when_it_differs_at_the_next_use(make_trainer, name):
    trainer = make_trainer(8, eval_dataset=samples(4))
    before = getattr(trainer.args, name)
    trainer._built_with = {**trainer._built_with, name: "another"}
    trainer.args.seed = 1  # any assignment has the arguments looked at
    for use in (trainer.train, trainer.evaluate):
        with pytest.raises(
            ValueError, match=rf"arguments were changed that a Trainer reads when it is built: .*{name}"
        ):
            use()
    assert getattr(trainer.args, name) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_cpu": False}, "use_cpu from True to False"),
        ({"report_to": ["jsonl"]}, r"report_to from \[\] to \['jsonl'\]"),
    ],
)
def test_the_message_names_both_values(make_trainer, changes, words):
    trainer = make_trainer(8)
    setting(**changes)(trainer.args)
    with pytest.raises(ValueError, match=words):
        trainer.train()


def test_a_token_that_is_changed_in_a_run_is_not_shown(make_trainer):
    trainer = make_trainer(16, hub_token="hidden-before", callbacks=[At(2, setting(hub_token="hidden-now"))])
    with pytest.raises(ValueError, match=r"args.hub_token was changed from \*\*\* to \*\*\*") as caught:
        trainer.train()
    assert "hidden" not in str(caught.value)


def test_an_assignment_to_the_trainer_does_not_hide_one_to_its_arguments(make_trainer):
    trainer = make_trainer(8)
    trainer.args.bf16 = True
    trainer.compute_loss_func = None
    with pytest.raises(ValueError, match="bf16 from False to True"):
        trainer.train()


# The next step


def test_the_norm_that_gradients_are_clipped_to_acts_from_the_next_step(make_trained):
    torch.manual_seed(0)
    model = Classifier()
    options = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.5, "max_grad_norm": 0}
    trainer = make_trained(
        16, train_sampling_strategy="sequential", callbacks=[At(2, setting(max_grad_norm=0.01))], **options
    )
    data = samples(16)
    for step in range(4):
        rows = data[4 * step : 4 * step + 4]
        model.zero_grad()
        model(**stack(rows))["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), math.inf if step < 2 else 0.01)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    for ours, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_label_smoothing_acts_from_the_next_step(make_trained):
    options = {"train_sampling_strategy": "sequential", "learning_rate": 0.0}
    trainer = make_trained(16, callbacks=[At(2, setting(label_smoothing_factor=0.2))], **options)
    logits = trainer.model(torch.stack([row["x"] for row in samples(16)]))["logits"]
    labels = torch.stack([row["labels"] for row in samples(16)])
    losses = log_of(trainer, "loss")
    for step, loss in enumerate(losses):
        part = slice(4 * step, 4 * step + 4)
        smoothing = 0.0 if step < 2 else 0.2
        expected = nn.functional.cross_entropy(logits[part], labels[part], label_smoothing=smoothing)
        assert loss == pytest.approx(expected.item(), rel=1e-6)


def test_times_of_logging_act_from_the_next_step(make_trained):
    trainer = make_trained(40, logging_steps=5, callbacks=[At(5, setting(logging_steps=2))])
    assert steps_with(trainer, "loss") == [5, 6, 8, 10]
    trainer = make_trained(24, logging_steps=1, callbacks=[At(2, setting(logging_strategy="epoch"))])
    assert steps_with(trainer, "loss") == [1, 2, 6]


def test_times_of_evaluation_act_from_the_next_step(make_trained):
    options = {"eval_dataset": samples(4), "eval_strategy": "steps"}
    trainer = make_trained(40, **options, eval_steps=5, callbacks=[At(5, setting(eval_steps=2))])
    assert steps_with(trainer, "eval_loss") == [5, 6, 8, 10]
    trainer = make_trained(24, **options, eval_steps=2, callbacks=[At(2, setting(eval_strategy="no"))])
    assert steps_with(trainer, "eval_loss") == [2]
    trainer = make_trained(24, **options, eval_steps=1, callbacks=[At(2, setting(eval_delay=5))])
    assert steps_with(trainer, "eval_loss") == [1, 2, 5, 6]


def test_a_share_of_the_run_is_a_number_of_steps_there_too(make_trained):
    trainer = make_trained(40, logging_steps=100, callbacks=[At(1, setting(logging_steps=0.5))])
    assert steps_with(trainer, "loss") == [5, 10]


def test_a_strategy_of_wall_time_is_refused_in_a_run(make_trainer):
    trainer = make_trainer(16, callbacks=[At(2, setting(logging_strategy="30s"))])
    with pytest.raises(ValueError, match="logging_strategy was changed .* acting by the clock is set up when"):
        trainer.train()


def test_values_that_do_not_go_together_are_refused_in_a_run(make_trainer):
    trainer = make_trainer(16, callbacks=[At(2, setting(load_best_model_at_end=True))])
    with pytest.raises(ValueError, match="load_best_model_at_end"):
        trainer.train()


def test_a_rate_changed_in_a_run_says_where_it_is_to_be_changed(make_trainer):
    trainer = make_trainer(16, callbacks=[At(2, setting(learning_rate=1.0))])
    with pytest.raises(ValueError, match=r"args.learning_rate was changed from 5e-05 to 1.0 .* set group\['lr'\]"):
        trainer.train()


# The next evaluation


def test_evaluation_arguments_act_at_the_next_evaluation(make_trainer):
    sizes = []

    class Sizes(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            sizes.append((self.state.global_step, len(inputs["labels"])))
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)

    options = {"eval_dataset": samples(4), "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    act = At(2, setting(per_device_eval_batch_size=2))
    make_trainer(16, trainer_class=Sizes, callbacks=[act], **options).train()
    assert sizes == [(2, 2), (2, 2), (4, 2), (4, 2)]


# Between runs


def test_arguments_changed_between_runs_are_those_of_the_second(make_trained):
    trainer = make_trained(16, logging_steps=2)
    trainer.args.logging_steps, trainer.args.per_device_train_batch_size, trainer.args.num_train_epochs = 1, 8, 2
    trainer.train()
    assert (trainer.state.max_steps, steps_with(trainer, "loss")) == (4, [1, 2, 3, 4])


def test_other_arguments_can_be_assigned_between_runs(make_trained, make_args):
    trainer = make_trained(16)
    trainer.args = make_args(per_device_train_batch_size=8, learning_rate=0.5)
    trainer.train()
    assert (trainer.state.max_steps, trainer.state.log_history[0]["learning_rate"]) == (2, 0.5)
    with pytest.raises(ValueError, match="ema_decay from None to 0.5"):
        trainer.args = make_args(ema_decay=0.5)


# Attributes


@pytest.mark.parametrize("name", sorted(TAKEN_AT_BEGIN))
def test_an_attribute_that_a_run_takes_when_it_begins_is_refused_in_its_middle(make_trainer, name):
    trainer = make_trainer(16)
    trainer.add_callback(At(2, lambda args: setattr(trainer, name, getattr(trainer, name))))
    with pytest.raises(RuntimeError, match=rf"trainer.{name} was assigned while training"):
        trainer.train()


def test_the_document_lists_what_acts_and_what_is_refused():
    text = DOCUMENT.read_text(encoding="utf-8")
    tables = {}
    for heading, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        tables[heading] = set(re.findall(r"`(\w+)`", body))
    assert tables["Attributes that are refused in a run"] == set(TAKEN_AT_BEGIN)


# Functions and schedules


def counted_sum(outputs, labels, num_items_in_batch):
    return 10 * nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("evaluates", [False, True], ids=["alone", "with an evaluation in that step"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_function_that_is_counted_is_given_the_count_from_the_next_step(make_trainer, evaluates, accumulation):
    options = {
        "train_sampling_strategy": "sequential",
        "learning_rate": 0.0,
        "gradient_accumulation_steps": accumulation,
    }
    if evaluates:
        options |= {"eval_dataset": samples(4), "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(16, per_device_train_batch_size=4 // accumulation, **options)
    trainer.add_callback(At(2, lambda args: setattr(trainer, "compute_loss_func", counted_sum)))
    trainer.train()
    logits = trainer.model(torch.stack([row["x"] for row in samples(16)]))["logits"]
    labels = torch.stack([row["labels"] for row in samples(16)])
    for step, loss in enumerate(log_of(trainer, "loss")):
        part = slice(4 * step, 4 * step + 4)
        expected = nn.functional.cross_entropy(logits[part], labels[part]).item() * (1 if step < 2 else 10)
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_run_resumed_after_a_group_was_added_in_it_says_what_it_needs(make_trainer, model, tmp_path):
    extra = nn.Parameter(torch.zeros(3))
    keeper = MemoryCheckpointer(tmp_path)
    options = {"checkpointer": keeper, "save_strategy": "steps", "save_steps": 3, "max_steps": 4}
    trainer = make_trainer(16, **options)
    trainer.add_callback(At(2, lambda args: trainer.optimizer.add_param_group({"params": [extra]})))
    trainer.train()
    with pytest.raises(
        ValueError, match="its optimizer had 3 parameter groups, and this run's has 2: groups that were"
    ):
        make_trainer(16, **options).train(resume_from_checkpoint=True)
    resumed = make_trainer(16, **options)
    resumed.create_optimizer().add_param_group({"params": [extra]})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


def test_a_schedule_assigned_in_a_run_is_what_its_checkpoints_are_compared_with(make_trainer, tmp_path):
    def constant(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=100)

    keeper = MemoryCheckpointer(tmp_path)
    options = {"checkpointer": keeper, "save_strategy": "steps", "save_steps": 3, "learning_rate": 0.1, "optim": "sgd"}
    trainer = make_trainer(16, **options)
    trainer.add_callback(At(2, lambda args: setattr(trainer, "lr_scheduler", constant(trainer.optimizer))))
    trainer.train()
    rates = log_of(trainer, "learning_rate")
    assert rates == pytest.approx([0.1, 0.075, 0.025, 0.025])
    resumed = make_trainer(16, **options)
    resumed.lr_scheduler = constant(resumed.create_optimizer())
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[-2]["learning_rate"] == pytest.approx(0.025)
