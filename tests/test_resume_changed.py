"""Go on from a checkpoint with other arguments: each is applied, or refused in words, and said in the log."""

import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

sys.path.insert(0, str(Path(__file__).parent))

from changed_runs import Network, build, resume, save
from shared.callbacks import Stop, StopAt
from shared.data import SeenRows, rows

from tr_core import EarlyStoppingCallback, Trainer, TrainerCallback


@pytest.fixture
def said(caplog):
    """Return what was logged of what changed, one line each."""
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records if " -> " in record.getMessage()]


def test_a_changed_learning_rate_is_applied_from_the_first_step_on(tmp_path, said):
    save(tmp_path, 8)
    trainer, used = resume(tmp_path, learning_rate=4e-3)
    assert used == {step: pytest.approx(4e-3 * (20 - step) / 20) for step in range(8, 20)}
    assert trainer.lr_scheduler.base_lrs == [4e-3, 4e-3]
    assert said() == ["learning_rate: 0.01 -> 0.004 (applied)"]


def test_unchanged_arguments_change_nothing_and_nothing_is_said(tmp_path, said):
    whole = build(tmp_path / "whole", save_strategy="no")
    whole.train()
    save(tmp_path, 8)
    trainer, _ = resume(tmp_path)
    assert all(map(torch.equal, whole.model.state_dict().values(), trainer.model.state_dict().values()))
    assert whole.optimizer.state_dict()["param_groups"] == trainer.optimizer.state_dict()["param_groups"]
    assert said() == []


def test_a_second_resume_with_the_changed_arguments_is_exact(tmp_path, said):
    save(tmp_path / "a", 8)
    changed = {"learning_rate": 4e-3, "weight_decay": 0.1, "num_train_epochs": 3}
    folder = str(tmp_path / "a" / "checkpoint-8")
    once = build(tmp_path / "b", **changed)
    once.train(resume_from_checkpoint=folder)
    with pytest.raises(Stop):
        build(tmp_path / "c", [StopAt(14)], save_steps=14, **changed).train(resume_from_checkpoint=folder)
    before = len(said())
    twice, _ = resume(tmp_path / "c", **changed)
    assert len(said()) == before
    assert all(map(torch.equal, once.model.state_dict().values(), twice.model.state_dict().values()))
    assert once.optimizer.param_groups[0]["lr"] == twice.optimizer.param_groups[0]["lr"] == 0.0


def test_options_of_the_optimizer_are_applied_and_its_moments_kept(tmp_path, said):
    save(tmp_path, 8)
    options = {"weight_decay": 0.25, "adam_beta1": 0.8, "adam_epsilon": 1e-6}
    trainer = build(tmp_path, [StopAt(8)], **options)
    with pytest.raises(Stop):
        trainer.train(resume_from_checkpoint=True)
    decayed, others = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.25, 0.0)
    assert decayed["betas"] == others["betas"] == (0.8, 0.999)
    assert decayed["eps"] == 1e-6
    assert all(state["step"].item() == 8 and state["exp_avg"].any() for state in trainer.optimizer.state.values())
    assert said() == [
        "weight_decay: 0.0 -> 0.25 (applied)",
        "adam_beta1: 0.9 -> 0.8 (applied)",
        "adam_epsilon: 1e-08 -> 1e-06 (applied)",
    ]


def test_changed_rules_for_parameters_are_applied(tmp_path, said):
    def rules(scale):
        return [{"params": "head", "lr_scale": scale}]

    save(tmp_path, 8, parameter_rules=rules(0.5))
    trainer, _ = resume(tmp_path, parameter_rules=rules(0.1))
    assert trainer.lr_scheduler.base_lrs == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])
    assert [line.endswith("(applied)") for line in said()] == [True]


def test_an_option_that_the_optimizer_has_no_use_for_is_said_to_have_no_effect(tmp_path, said):
    save(tmp_path, 3, optim="sgd")
    resume(tmp_path, optim="sgd", adam_beta1=0.5)
    assert said() == ["adam_beta1: 0.9 -> 0.5 (no effect: no parameter group depends on it)"]


def test_an_option_that_needs_a_state_the_checkpoint_lacks_is_refused(tmp_path):
    save(tmp_path, 3, optim="adamw_torch")
    with pytest.raises(ValueError, match="amsgrad: False -> True needs max_exp_avg_sq of every parameter"):
        resume(tmp_path, optim="adamw_torch", optim_args="amsgrad=True")
    save(tmp_path / "sgd", 3, optim="sgd")
    trainer, _ = resume(tmp_path / "sgd", optim="sgd", optim_args="momentum=0.9")  # begins with the first gradient
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.9


def test_another_optimizer_is_refused_naming_both(tmp_path):
    save(tmp_path, 3)
    with pytest.raises(ValueError, match=r"was AdamW \(optim='adamw_torch_fused'\) and is SGD now \(optim='sgd'\)"):
        resume(tmp_path, optim="sgd")


def test_the_same_optimizer_by_another_name_goes_on(tmp_path, said):
    save(tmp_path, 3)
    trainer, _ = resume(tmp_path, optim="adamw_torch")
    assert trainer.optimizer.param_groups[0]["fused"] is None
    assert said() == ["optim: adamw_torch_fused -> adamw_torch (applied)"]


def test_another_kind_of_schedule_goes_on_at_the_step_of_now(tmp_path, said):
    save(tmp_path, 8)
    _, used = resume(tmp_path, lr_scheduler_type="cosine", warmup_steps=2)
    assert used == {s: pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * (s - 2) / 18))) for s in range(8, 20)}
    assert said() == ["lr_scheduler_type: linear -> cosine (applied)", "warmup_steps: 0 -> 2 (applied)"]


@pytest.mark.parametrize(
    ("step", "longer"), [(20, {"num_train_epochs": 4}), (20, {"max_steps": 40}), (7, {"max_steps": 40})]
)
def test_a_run_that_is_made_longer_goes_on_with_the_longer_schedule(tmp_path, said, step, longer):
    save(tmp_path, step) if step < 20 else build(tmp_path).train()
    trainer, used = resume(tmp_path, **longer)
    assert trainer.state.global_step == 40
    assert used == {s: pytest.approx(1e-2 * (40 - s) / 40) for s in range(step, 40)}  # the old schedule ended at 0
    assert f"steps of the schedule: 20 -> 40, of which {step} count as done (applied)" in said()


def test_with_larger_steps_a_run_is_as_far_along_its_schedule_as_its_samples_say(tmp_path, said):
    save(tmp_path, 10)  # the first of two passes, which is half of the run
    trainer, used = resume(tmp_path, per_device_train_batch_size=8)
    assert used == {10 + s: pytest.approx(1e-2 * (10 - 5 - s) / 10) for s in range(5)}
    assert trainer.state.global_step == trainer.state.max_steps == 15
    assert "steps of the schedule: 20 -> 10, of which 5 count as done (applied)" in said()


def test_the_plateau_keeps_what_it_lowered_under_another_learning_rate(tmp_path, said):
    options = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs"},
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    save(tmp_path, 8, **options)
    trainer = build(tmp_path, [StopAt(8)], **{**options, "learning_rate": 4e-2})
    with pytest.raises(Stop):
        trainer.train(resume_from_checkpoint=True)
    # The first evaluation is the best for ever, and each of the three others halved the rate.
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([4e-2 / 8] * 2)
    assert trainer.lr_scheduler.last_epoch == 4
    assert said() == ["learning_rate: 0.01 -> 0.04 (applied)"]
    changed = {**options, "lr_scheduler_kwargs": {**options["lr_scheduler_kwargs"], "factor": 0.1}}
    trainer = build(tmp_path, [StopAt(8)], **changed)
    with pytest.raises(Stop):
        trainer.train(resume_from_checkpoint=True)
    assert (trainer.lr_scheduler.factor, trainer.lr_scheduler.last_epoch) == (0.1, 4)
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-2 / 8


def test_a_plateau_in_place_of_a_function_begins_anew_and_the_other_way_round(tmp_path, said):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}
    save(tmp_path / "a", 8, eval_strategy="epoch", metric_for_best_model="loss")
    trainer, used = resume(tmp_path / "a", **plateau)
    assert used[8] == 1e-2
    assert trainer.lr_scheduler.last_epoch == 2
    assert said() == ["lr_scheduler_type: linear -> reduce_lr_on_plateau (applied; the schedule starts over)"]
    save(tmp_path / "b", 8, **plateau)
    _, used = resume(tmp_path / "b", eval_strategy="epoch", metric_for_best_model="loss")
    assert used[8] == pytest.approx(1e-2 * 12 / 20)


def test_a_rate_that_a_callback_set_survives_where_the_argument_did_not_change(tmp_path):
    class Halve(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                for group in kwargs["optimizer"].param_groups:
                    group["lr"] *= 0.5
                    group["weight_decay"] = 0.7

    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}
    with pytest.raises(Stop):
        build(tmp_path, [Halve(), StopAt(5)], save_steps=5, **options).train()
    trainer = build(tmp_path, [StopAt(5)], **{**options, "adam_epsilon": 1e-6})
    with pytest.raises(Stop):
        trainer.train(resume_from_checkpoint=True)
    group = trainer.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["eps"]) == (5e-3, 0.7, 1e-6)


def test_an_optimizer_and_a_schedule_that_were_given_go_on_as_saved(tmp_path, said):
    def given(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)

    save(tmp_path, 8, optimizers=given)
    _, used = resume(tmp_path, optimizers=given, learning_rate=0.5, lr_scheduler_type="cosine")
    assert (used[8], used[10]) == (pytest.approx(0.01), pytest.approx(0.001))
    assert said() == [
        "learning_rate: 0.01 -> 0.5 (not applied: SGD was given, and its saved state goes on)",
        "lr_scheduler_type: linear -> cosine (not applied: the saved state of StepLR goes on)",
    ]


def test_a_schedule_of_a_subclass_goes_on_as_saved(tmp_path, said):
    class Steps(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 5)
            return self.lr_scheduler

    save(tmp_path, 8, kind=Steps)
    _, used = resume(tmp_path, kind=Steps, learning_rate=0.5)
    assert used[8] == pytest.approx(1e-3)
    assert said() == ["learning_rate: 0.01 -> 0.5 (not applied: the saved state of StepLR, your own schedule, goes on)"]


def test_what_code_of_the_users_builds_into_the_groups_is_applied_and_said(tmp_path, said):
    class Own(Trainer):
        rate = 0.1

        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate)
            return self.optimizer

    save(tmp_path, 8, kind=Own)
    _, used = resume(tmp_path, kind=type("Own", (Own,), {"rate": 0.2}))
    assert used[8] == pytest.approx(0.2 * 12 / 20)
    assert said() == ["learning_rate of parameter group 0: 0.1 -> 0.2 (applied)"]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"seed": 9}, "seed: 42 -> 9"),
        ({"data_seed": 9}, "data_seed: None -> 9"),
        ({"overfit_batches": 5}, "overfit_batches: None -> 5"),
        ({"data": rows(44)}, "samples of the training data: 40 -> 44"),
    ],
)
def test_another_order_of_the_data_is_refused_in_the_middle_of_a_pass(tmp_path, said, changed, line):
    save(tmp_path, 13, save_steps=1)
    with pytest.raises(ValueError, match="12 samples into an epoch.*ignore_data_skip=True") as error:
        resume(tmp_path, **changed)
    assert line in str(error.value)
    resume(tmp_path, 13, **changed, ignore_data_skip=True, save_strategy="no")
    assert said()[0] == f"{line} (applied: the epoch restarts)"
    resume(tmp_path, 10, **changed, save_strategy="no")
    assert f"{line} (applied from the next epoch on)" in said()


def test_more_data_between_two_passes_is_gone_through_in_the_next(tmp_path):
    class Seen(list):
        asked = ()

        def __getitem__(self, index):
            self.asked = (*self.asked, index)
            return super().__getitem__(index)

    save(tmp_path, 10)
    data = Seen(rows(48))
    trainer, used = resume(tmp_path, data=data)
    assert sorted(data.asked) == list(range(48))
    assert trainer.state.global_step == trainer.state.max_steps == 10 + 12
    assert used[10] == pytest.approx(1e-2 * 12 / 24)


def test_a_seed_that_no_order_depends_on_has_no_effect(tmp_path, said):
    whole = build(tmp_path / "whole", data_seed=3, save_strategy="no")
    whole.train()
    save(tmp_path, 8, data_seed=3)
    trainer, _ = resume(tmp_path, data_seed=3, seed=9)
    assert said() == ["seed: 42 -> 9 (no effect: random states are those of the checkpoint)"]
    assert all(map(torch.equal, whole.model.state_dict().values(), trainer.model.state_dict().values()))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(40))


def test_iterable_data_keeps_its_own_order_under_another_seed(tmp_path, said):
    save(tmp_path, 8, data=Stream(), max_steps=15)
    resume(tmp_path, data=Stream(), max_steps=15, data_seed=9)
    assert said() == ["data_seed: None -> 9 (applied)"]


def test_free_arguments_are_applied_and_said(tmp_path, said):
    save(tmp_path, 8)
    changed = {"bf16": True, "max_grad_norm": 0.01, "label_smoothing_factor": 0.1, "weight_decay": 0.1}
    trainer, _ = resume(tmp_path, **changed)
    assert trainer.state.global_step == 20
    assert said() == [
        "weight_decay: 0.0 -> 0.1 (applied)",
        "max_grad_norm: 1.0 -> 0.01 (applied)",
        "label_smoothing_factor: 0.0 -> 0.1 (applied)",
        "bf16: False -> True (applied)",
    ]


def test_arguments_that_change_no_number_are_passed_over(tmp_path, said):
    save(tmp_path, 8)
    resume(tmp_path, logging_steps=5, save_steps=4, dataloader_num_workers=0, run_name="other", hub_token="secret")
    assert said() == []
    text = (tmp_path / "checkpoint-8" / "settings.json").read_text()
    assert "secret" not in text
    assert "output_dir" not in text


def test_a_checkpoint_without_settings_goes_on_as_it_was_saved(tmp_path, said, caplog):
    """As those of another program are."""
    from tr_ckpt import Checkpointer

    later = build(tmp_path, [StopAt(8)], save_steps=8)
    with pytest.raises(Stop):
        later.train()
    # The same parts, but for that one.
    kept = Checkpointer(tmp_path)

    class Any:
        def __init__(self, name):
            self.name = name

        def state_dict(self):
            return kept.restored.states[self.name]

    names = ["model", "optimizer", "scheduler", "rng", "run", "callbacks", "trainer_state"]
    kept.restore({}, only_read=names)
    Checkpointer(tmp_path / "old").save(8, {name: Any(name) for name in names})
    _, used = resume(tmp_path / "old", 8, learning_rate=0.5)
    assert used[8] == pytest.approx(1e-2 * 12 / 20)
    assert "does not say what it was trained with" in caplog.text


def test_another_metric_forgets_the_best_model_of_the_old_one(tmp_path, said):
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    save(tmp_path, 8, **options)
    trainer = build(tmp_path, [StopAt(8)], **{**options, "metric_for_best_model": "eval_runtime"})
    with pytest.raises(Stop):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_metric is trainer.state.best_global_step is None
    assert "metric_for_best_model: loss -> eval_runtime (applied; the best so far is forgotten)" in said()
    trainer = build(tmp_path, [StopAt(8)], **{**options, "metric_for_best_model": "eval_loss"})
    with pytest.raises(Stop):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_metric is not None  # only its name is longer


def test_parameters_in_another_order_are_refused(tmp_path):
    class Swapped(Network):
        def __init__(self):
            super().__init__()
            self._modules = dict(reversed(self._modules.items()))

    save(tmp_path, 3)
    with pytest.raises(ValueError, match=r"head.weight comes where encoder.0.weight came when it was saved"):
        resume(tmp_path, network=Swapped)


class Counter(TrainerCallback):
    def __init__(self, by=1):
        self.by, self.count = by, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += self.by

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Other(Counter):
    pass


def test_callbacks_that_the_checkpoint_does_not_know_are_named_and_the_others_restored(tmp_path, caplog):
    with pytest.raises(Stop):
        build(tmp_path, [Counter(), Counter(10), StopAt(5)], save_steps=5).train()
    counters = [Counter(), Other()]
    with pytest.raises(Stop):
        build(tmp_path, [*counters, StopAt(7)]).train(resume_from_checkpoint=True)
    assert [counter.count for counter in counters] == [7, 2]
    assert "states of callbacks that this run does not have, and which are skipped: Counter#2" in caplog.text
    assert "holds no state of these callbacks, which start over: Other" in caplog.text


def test_callbacks_begin_anew_where_that_is_asked_for(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    stopping = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    averaging = {"ema_decay": 0.9, **stopping}
    with pytest.raises(Stop):
        build(tmp_path, [Counter(), EarlyStoppingCallback(50), StopAt(5)], save_steps=5, **averaging).train()
    counter = Counter()
    trainer = build(
        tmp_path,
        [counter, EarlyStoppingCallback(50), StopAt(7)],
        restore_callback_states_from_checkpoint=False,
        **averaging,
    )
    with pytest.raises(Stop):
        trainer.train(resume_from_checkpoint=True)
    assert counter.count == 2
    assert "restore_callback_states_from_checkpoint=False: Counter, EarlyStoppingCallback start over" in caplog.text


class SizedStream(Stream):
    def __len__(self):
        return 40


@pytest.mark.parametrize("data", [None, Stream(), SizedStream()], ids=["map", "stream", "sized stream"])
@pytest.mark.parametrize("skips", [True, False], ids=["skipped", "from the beginning of the epoch"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"per_device_train_batch_size": 2}),
        pytest.param({}, {"per_device_train_batch_size": 8}, marks=pytest.mark.slow),
        pytest.param({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 1}, marks=pytest.mark.slow),
        ({}, {"gradient_accumulation_steps": 3}),
    ],
    ids=["half the batch", "twice the batch", "half the accumulation", "more accumulation"],
)
def test_a_run_of_a_number_of_steps_ends_there_whatever_changed_at_its_resume(tmp_path, data, skips, before, after):
    length = {"max_steps": 30}
    save(tmp_path, 26, data=data, **length, **before)
    trainer, used = resume(tmp_path, data=data, ignore_data_skip=not skips, **length, **after)
    assert trainer.state.global_step == trainer.state.max_steps == 30
    assert list(used) == [26, 27, 28, 29]
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_a_run_of_epochs_that_goes_on_with_a_number_of_steps_ends_there(tmp_path):
    save(tmp_path, 15)
    trainer, used = resume(tmp_path, max_steps=30, per_device_train_batch_size=2)
    assert list(used) == list(range(15, 30))


def test_a_run_of_a_number_of_steps_goes_on_to_its_end_with_more_data(tmp_path):
    save(tmp_path, 30, max_steps=40)
    trainer, _ = resume(tmp_path, data=rows(400), max_steps=40)
    assert trainer.state.global_step == 40
    assert trainer.state.num_train_epochs == 4


@pytest.mark.parametrize(("size", "epochs"), [(2, 3), (4, 4), (8, 5)])
def test_the_state_says_how_many_epochs_a_run_of_a_number_of_steps_comes_to(tmp_path, size, epochs):
    save(tmp_path, 25, max_steps=35)
    trainer, _ = resume(tmp_path, max_steps=35, per_device_train_batch_size=size)
    assert math.ceil(trainer.state.epoch) == trainer.state.num_train_epochs == epochs


class TwoStepsAnEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 2 == 0


@pytest.mark.parametrize("data", [None, Stream(), SizedStream()], ids=["map", "stream", "sized stream"])
def test_epochs_that_a_callback_ends_end_no_run_of_a_number_of_steps(tmp_path, data):
    trainer = build(tmp_path, [TwoStepsAnEpoch()], data=data, max_steps=24, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 24


@pytest.mark.parametrize(("size", "last"), [(2, 25), (4, 20), (8, 18)])
def test_an_epoch_that_begins_again_leaves_a_run_of_epochs_as_many_samples_as_before(tmp_path, size, last):
    save(tmp_path, 15)
    changed = {"per_device_train_batch_size": size, "ignore_data_skip": True}
    trainer, used = resume(tmp_path, save_steps=16, **changed)
    assert trainer.state.global_step == trainer.state.max_steps == last
    assert list(used) == list(range(15, last))
    again, _ = resume(tmp_path, 16, **changed)  # unchanged from there
    assert again.state.global_step == again.state.max_steps == last


@pytest.mark.parametrize(("number", "last"), [(20, 20), (400, 20)])
def test_an_epoch_that_begins_again_with_other_data_ends_when_it_says(tmp_path, number, last):
    save(tmp_path, 13)
    trainer, _ = resume(tmp_path, data=rows(number), ignore_data_skip=True)
    assert trainer.state.global_step == trainer.state.max_steps
    assert trainer.state.max_steps == min(last, 13 + math.ceil(number / 4))


def test_a_run_without_the_flow_of_callbacks_ends_with_the_epoch_of_its_last_step(tmp_path):
    from tr_core import DefaultFlowCallback

    trainer = build(tmp_path, max_steps=15, save_strategy="no")
    trainer.remove_callback(DefaultFlowCallback)
    trainer.train()
    assert trainer.state.global_step == 20


@pytest.mark.parametrize("number", [40, 48])
def test_an_epoch_that_is_over_does_not_begin_again(tmp_path, number):
    save(tmp_path, 10)
    data, usual = SeenRows(rows(number)), SeenRows(rows(number))
    trainer, _ = resume(tmp_path, data=data, ignore_data_skip=True, save_strategy="no")
    resume(tmp_path, data=usual)
    assert trainer.state.epoch == 2
    assert data.seen == usual.seen
