"""Rules of parameters, the greedy schedule and samplers of one's own, with checkpoints and other packages."""

import pytest
import torch
from shared.callbacks import Stop, StopAt
from shared.data import rows
from shared.results import history
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.GELU())
        self.head = nn.Linear(16, 3)

    def forward(self, x, labels):
        logits = self.head(self.encoder(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


RULES = [
    {"params": r"encoder\.0\..*", "name": "bottom", "lr_scale": 0.1},
    {"params": "head", "learning_rate": 0.05, "weight_decay": 0.3},
]


def make(folder, stop_at=None, kind=Trainer, **changes):
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 3,
        "save_steps": 2,
        "parameter_rules": RULES,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    callbacks = [] if stop_at is None else [StopAt(stop_at)]
    return kind(Network(), args, train_dataset=rows(20), eval_dataset=rows(9, 1), callbacks=callbacks)


def end_of(trainer):
    states = trainer.optimizer.state_dict()["state"].values()
    moments = [state[name] for state in states for name in sorted(state)]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    return history(trainer), groups, [*trainer.model.state_dict().values(), *moments]


def assert_same(one, other):
    assert one[:2] == other[:2]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one[2], other[2], strict=True))


def test_the_rates_of_an_epoch_whose_last_step_was_saved_are_logged_after_the_resume(tmp_path):
    """That log comes before any step of the resumed run."""

    class StopAfterSave(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise Stop

    options = {"logging_strategy": "epoch", "save_steps": 5, "num_train_epochs": 2}
    alone = make(tmp_path / "alone", **options)
    alone.train()
    cut = make(tmp_path / "cut", **options)
    cut.add_callback(StopAfterSave())
    with pytest.raises(Stop):
        cut.train()
    resumed = make(tmp_path / "cut", **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same(end_of(alone), end_of(resumed))
    assert "learning_rate/head" in resumed.state.log_history[0]


def test_a_checkpoint_of_other_rules_is_refused(tmp_path):
    with pytest.raises(Stop):
        make(tmp_path, 4).train()
    with pytest.raises(ValueError, match=r"of the parameter groups default \(0\), .*bottom.* now make default \(2\)"):
        make(tmp_path, parameter_rules=None).train(resume_from_checkpoint=True)


def test_adafactor_takes_the_rules_and_its_own_options(tmp_path):
    rules = [{"params": "head", "lr_scale": 0.5, "clip_threshold": 0.25}]
    trainer = make(tmp_path, optim="adafactor", parameter_rules=rules, save_strategy="no")
    groups = trainer.create_optimizer().param_groups
    assert [group["lr"] for group in groups] == [1e-2, 1e-2, 5e-3, 5e-3]
    assert [group["clip_threshold"] for group in groups] == [1.0, 1.0, 0.25, 0.25]
    trainer.train()
    bad = make(tmp_path, optim="adafactor", parameter_rules=[{"params": "head", "betas": [0.1, 0.2]}])
    with pytest.raises(ValueError, match="sets betas, which Adafactor does not take"):
        bad.create_optimizer()


class Weighted(Trainer):
    """Draws samples by their weights, as for classes of different size."""

    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.WeightedRandomSampler([1.0, 5.0] * (len(train_dataset) // 2), num_samples=18)


def test_a_run_with_a_random_sampler_of_its_own_resumes_bit_equal(tmp_path):
    alone = make(tmp_path / "alone", kind=Weighted)
    alone.train()
    for stop_at in (3, 5, 8):
        with pytest.raises(Stop):
            make(tmp_path / str(stop_at), stop_at, kind=Weighted).train()
        resumed = make(tmp_path / str(stop_at), kind=Weighted)
        resumed.train(resume_from_checkpoint=True)
        assert_same(end_of(alone), end_of(resumed))
