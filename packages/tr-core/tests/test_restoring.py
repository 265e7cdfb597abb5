"""What a resumed run takes from a checkpoint, whatever keeps the checkpoints."""

import logging
from functools import partial

import pytest
import torch
from support.callbacks import Stop, StopAt
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Classifier
from support.runs import ScaledDevice

from tr_core import Trainer, TrainerCallback


def fresh_model():
    torch.manual_seed(0)
    return Classifier(dropout=0.2)


@pytest.fixture
def make(make_trainer):
    """Build a Trainer of 10 steps, whose checkpoints are where they were put last."""
    kept = MemoryCheckpointer()

    def build(*callbacks, **changes):
        options = {"num_train_epochs": 2, "learning_rate": 0.01, "save_strategy": "steps", "save_steps": 1}
        changes.setdefault("model", fresh_model())
        changes.setdefault("checkpointer", kept)
        return make_trainer(callbacks=list(callbacks), **{**options, **changes})

    build.kept = kept
    return build


def stop_at(trainer, **options):
    with pytest.raises(Stop):
        trainer.train(**options)
    return trainer


def rates(trainer):
    return [group["lr"] for group in trainer.optimizer.param_groups]


def test_a_changed_learning_rate_is_applied_before_the_first_step(make):
    stop_at(make(StopAt(4)))
    resumed = stop_at(make(StopAt(4), learning_rate=0.5), resume_from_checkpoint=True)
    assert rates(resumed) == pytest.approx([0.5 * 0.6] * 2)


def test_the_first_step_of_a_run_that_was_made_longer_is_not_at_the_old_ones_last_rate(make):
    whole = make()
    whole.train()
    assert rates(whole) == [0.0, 0.0]
    resumed = stop_at(make(StopAt(10), num_train_epochs=4), resume_from_checkpoint=True)
    assert rates(resumed) == pytest.approx([0.005, 0.005])


def test_a_checkpoint_says_what_it_was_trained_with_and_no_secret(make):
    stop_at(make(StopAt(2), hub_token="hf_secret"))
    saved = make.kept.saved[2]["settings"]
    assert next(iter(make.kept.saved[2])) == "settings"
    assert saved["arguments"]["learning_rate"] == 0.01
    assert "hub_token" not in saved["arguments"]
    assert "hf_secret" not in repr(saved)
    assert saved["groups"][0]["parameters"] == ["layers.0.weight", "layers.3.weight"]


@pytest.mark.parametrize("given", [True, "auto", None])
def test_the_argument_of_train_goes_before_that_of_the_arguments(make, given):
    stop_at(make(StopAt(4)))
    resumed = stop_at(make(StopAt(4), resume_from_checkpoint="true"), resume_from_checkpoint=given)
    assert resumed.state.global_step == 4
    assert stop_at(make(StopAt(0), resume_from_checkpoint="true"), resume_from_checkpoint=False).state.global_step == 0


def test_a_loss_scale_that_was_not_saved_starts_over_and_one_too_many_is_skipped(make, caplog):
    caplog.set_level(logging.INFO, logger="tr_core")
    stop_at(make(StopAt(3)))
    resumed = stop_at(
        make(StopAt(5), trainer_class=partial(Trainer, strategy=ScaledDevice(8.0)), log_level="info"),
        resume_from_checkpoint=True,
    )
    assert "holds no loss scale, as it was saved without fp16: it starts over" in caplog.text
    assert make.kept.saved[5]["scaler"]["scale"] == resumed.strategy.scale
    assert stop_at(make(StopAt(6)), resume_from_checkpoint=True).state.global_step == 6
    caplog.clear()
    stop_at(
        make(StopAt(5), trainer_class=partial(Trainer, strategy=ScaledDevice(8.0)), log_level="info"),
        resume_from_checkpoint="memory/checkpoint-5",
    )
    assert "loss scale" not in caplog.text


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "rng", "run", "callbacks", "trainer_state"])
def test_a_part_that_is_missing_is_an_error(make, part):
    stop_at(make(StopAt(3)))
    del make.kept.saved[3][part]
    with pytest.raises(ValueError, match=part):
        make().train(resume_from_checkpoint=True)


class OwnFiles(Trainer):
    """Writes the model's files itself."""

    def _save(self, output_dir=None, state_dict=None):
        return


@pytest.mark.parametrize("kinds", [(Trainer, OwnFiles), (OwnFiles, Trainer)], ids=["added", "taken away"])
def test_a_run_goes_on_with_or_without_an_override_that_writes_the_models_files(make, kinds):
    whole = make()
    whole.train()
    first, second = kinds
    stop_at(make(StopAt(3), trainer_class=first))
    with torch.random.fork_rng():
        torch.manual_seed(9)
        other = Classifier(dropout=0.2)
    resumed = make(trainer_class=second, model=other)
    resumed.train(resume_from_checkpoint="memory/checkpoint-3")
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


def test_a_best_model_of_before_an_override_that_writes_the_models_files_is_loaded(make):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps"}
    options |= {"eval_steps": 1, "eval_dataset": samples(8, 1)}
    stop_at(make(StopAt(3), learning_rate=0.0, **options))
    best = make.kept.saved[1]["model"]
    resumed = make(trainer_class=OwnFiles, learning_rate=5.0, max_steps=4, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_global_step == 1
    assert all(torch.equal(value, best[name]) for name, value in resumed.model.state_dict().items())


def test_the_state_of_another_kind_of_schedule_is_not_taken_for_this_ones(make):
    stop_at(make(StopAt(3)))
    del make.kept.saved[3]["settings"]  # as of another program, which does not say what there was
    with pytest.raises(ValueError, match="is not a ReduceLROnPlateau.*saved lr_scheduler_type"):
        make(
            lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", eval_dataset=make().train_dataset[:4]
        ).train(resume_from_checkpoint=True)


def test_layers_in_another_order_are_refused_and_not_given_each_others_moments(make):
    class Reversed(Classifier):
        def named_parameters(self, *args, **kwargs):
            return reversed(list(super().named_parameters(*args, **kwargs)))

    stop_at(make(StopAt(3)))
    torch.manual_seed(0)
    model = Reversed()
    with pytest.raises(ValueError, match=r"layers.3.weight comes where layers.0.weight came"):
        make(model=model).train(resume_from_checkpoint=True)


def test_the_step_count_of_the_plan_follows_the_position_when_an_epoch_is_stopped_early(make):
    """A callback that ends epochs makes fewer steps than planned: unchanged arguments still change no rate."""

    class EndPass(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 2 == 0

    stopped = stop_at(make(EndPass(), StopAt(3)))
    resumed = stop_at(make(EndPass(), StopAt(3)), resume_from_checkpoint=True)
    assert rates(resumed) == rates(stopped)


def test_a_found_batch_size_is_no_changed_argument(make, caplog):
    caplog.set_level(logging.INFO, logger="tr_core")
    stop_at(make(StopAt(3), auto_find_batch_size=True, per_device_train_batch_size=2, gradient_accumulation_steps=2))
    saved = make.kept.saved[3]
    saved["trainer_state"]["train_batch_size"] = saved["run"]["found_size"] = 2
    resumed = stop_at(make(StopAt(3), auto_find_batch_size=True, log_level="info"), resume_from_checkpoint=True)
    assert resumed.state.train_batch_size == 2
    assert " -> " not in caplog.text


def test_a_subclass_that_overrides_nothing_is_no_other_optimizer(make):
    class Own(Trainer):
        pass

    stop_at(make(StopAt(3)))
    resumed = stop_at(make(StopAt(4), trainer_class=Own), resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
