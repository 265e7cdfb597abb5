"""Overrides that write the model's files run on all ranks, at checkpoints and by hand, as in transformers."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from shared.data import rows
from shared.models import LinearClassifier

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

UNITS = {"transformer_layer_cls_to_wrap": ["Linear"]}
BACKENDS = {"ddp": {"strategy": "ddp"}, "fsdp": {"fsdp": "full_shard auto_wrap", "fsdp_config": UNITS}}


def sum_of_ranks(rank):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return total.item()


def note(trainer, folder, name):
    """Exchange between ranks, and write what came of it on the main process."""
    total = sum_of_ranks(trainer.args.process_index)
    if trainer.args.should_save:
        Path(folder, name).write_text(json.dumps({"total": total, "step": trainer.state.global_step}))


class OwnSave(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        note(self, output_dir, "own.json")


class OwnSaveModel(Trainer):
    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call=_internal_call)
        note(self, output_dir, "own.json")


class OwnCheckpoint(Trainer):
    """Exchanges before and after a checkpoint."""

    def _save_checkpoint(self, model, trial):
        sum_of_ranks(self.args.process_index)
        super()._save_checkpoint(model, trial)
        note(self, f"{self.args.output_dir}/checkpoint-{self.state.global_step}", "own.json")


class Loading(Trainer):
    """Exchanges where it loads the model, before and after the inherited method."""

    optimizer_then = "not asked"

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.optimizer_then = self.optimizer
        before = sum_of_ranks(self.args.process_index)
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.totals = before, sum_of_ranks(self.args.process_index)


class Failing(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.args.process_index == 1:
            raise OSError("rank 1 has no space left")


KINDS = {kind.__name__: kind for kind in (OwnSave, OwnSaveModel, OwnCheckpoint, Loading, Failing)}


def build(folder, kind, backend):
    args = TrainingArguments(
        f"{folder}/out",
        per_device_train_batch_size=2,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        ddp_timeout=60,
        **BACKENDS[backend],
    )
    return KINDS[kind](LinearClassifier(seed=0), args, train_dataset=rows(24))


def train(folder, kind, backend):
    trainer = build(folder, kind, backend)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    again = build(folder, kind, backend)
    again.args.max_steps = 6
    again.train(resume_from_checkpoint=True)
    steps = again.state.global_step
    again.strategy.close()
    return {name: value.clone() for name, value in weights.items()}, steps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["OwnSave", "OwnSaveModel"])
def test_an_override_that_writes_the_models_files_may_exchange_between_ranks(kind, backend, tmp_path):
    (weights, steps), _ = run_ranks(train, 2, str(tmp_path), kind, backend, timeout_s=120)
    assert steps == 6
    for folder, step in (("out/checkpoint-2", 2), ("out/checkpoint-4", 4), ("final", 4)):
        own = json.loads((tmp_path / folder / "own.json").read_text())
        assert own == {"total": 3.0, "step": step}
    for folder in ("out/checkpoint-4", "final"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert saved.keys() == weights.keys()
        assert all(torch.equal(saved[name], weights[name]) for name in weights)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".written")] == []


def test_an_override_of_a_checkpoint_may_exchange_between_ranks(tmp_path):
    (_, steps), _ = run_ranks(train, 2, str(tmp_path), "OwnCheckpoint", "ddp", timeout_s=120)
    assert steps == 6
    own = json.loads((tmp_path / "out" / "checkpoint-4" / "own.json").read_text())
    assert own == {"total": 3.0, "step": 4}


def load(folder, backend):
    whole = build(folder, "Loading", backend)
    whole.train()
    weights = whole.strategy.full_state_dict(whole.model_wrapped)
    resumed = build(folder, "Loading", backend)
    resumed.train(resume_from_checkpoint=f"{folder}/out/checkpoint-2")
    again = resumed.strategy.full_state_dict(resumed.model_wrapped)
    resumed.strategy.close()
    is_same = all(torch.equal(value, weights[name]) for name, value in again.items())
    return is_same, resumed.totals, resumed.optimizer_then is None, resumed.state.global_step


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_override_that_loads_the_model_may_exchange_between_ranks(backend, tmp_path):
    comes_first = backend == "ddp"  # FSDP divides the model first, as under transformers
    assert run_ranks(load, 2, str(tmp_path), backend, timeout_s=120) == [(True, (3.0, 3.0), comes_first, 4)] * 2


def fail(folder):
    trainer = build(folder, "Failing", "ddp")
    try:
        trainer.train()
    except (OSError, RuntimeError) as error:
        return str(error)
    finally:
        trainer.strategy.close()


def test_a_failure_on_one_rank_ends_the_save_on_all(tmp_path):
    first, second = run_ranks(fail, 2, str(tmp_path), timeout_s=120)
    assert "not written on rank 1: OSError: rank 1 has no space left" in first
    assert second == "rank 1 has no space left"
    assert list((tmp_path / "out").glob("checkpoint-*")) == []
