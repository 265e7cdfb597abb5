"""Memory of a stage, as the kernel and torch report it, with no thread that looks."""

import threading

import pytest
import torch
from support.data import samples
from support.models import Classifier

from tr_core import Trainer
from tr_core.runtime import memory
from tr_core.runtime.memory import MemoryMeter, is_out_of_memory

CPU = torch.device("cpu")
MIB = 2**20
HAS_PROC = memory._STATUS.exists()
NAMES = ("mem_cpu_alloc_delta", "mem_cpu_peaked_delta")
needs_proc = pytest.mark.skipif(not HAS_PROC, reason="needs /proc")


def names_in(metrics):
    return sorted(name for name in metrics if "_mem_" in name)


@needs_proc
def test_train_evaluate_and_predict_tell_their_memory(make_trainer):
    trainer = make_trainer(8, skip_memory_metrics=False, eval_dataset=samples(4), eval_strategy="epoch")
    trained = trainer.train().metrics
    assert names_in(trained) == [f"train_{name}" for name in NAMES]
    assert names_in(trainer.evaluate()) == [f"eval_{name}" for name in NAMES]
    assert names_in(trainer.evaluate(metric_key_prefix="dev")) == [f"dev_{name}" for name in NAMES]
    assert names_in(trainer.predict(samples(4)).metrics) == [f"test_{name}" for name in NAMES]
    logged = [names_in(entry) for entry in trainer.state.log_history if names_in(entry)]
    # The evaluation inside training is training's, and a prediction is not logged.
    assert logged == [[f"{stage}_{name}" for name in NAMES] for stage in ("train", "eval", "dev")]
    assert all(isinstance(trained[name], int) for name in names_in(trained))


def test_by_default_nothing_is_measured(make_trainer):
    trainer = make_trainer(8, eval_dataset=samples(4))
    assert names_in(trainer.train().metrics) == []
    assert names_in(trainer.evaluate()) == []


class Allocates(Trainer):
    """Takes 256 MiB in every step and keeps 128 MiB of the first: far more than what else comes and goes meanwhile."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not hasattr(self, "kept"):
            self.kept = torch.ones(128 * MIB // 4)
        torch.ones(256 * MIB // 4).sum()
        self.threads = threading.active_count()
        return super().training_step(model, inputs, num_items_in_batch)


@needs_proc
def test_what_is_kept_and_what_was_only_the_peak_are_distinguished(make_trainer):
    before = threading.active_count()
    trainer = make_trainer(8, trainer_class=Allocates, skip_memory_metrics=False)
    metrics = trainer.train().metrics
    assert 96 * MIB < metrics["train_mem_cpu_alloc_delta"] < 192 * MIB
    assert 192 * MIB < metrics["train_mem_cpu_peaked_delta"] < 320 * MIB
    assert trainer.threads <= before  # of an earlier test some may end meanwhile


@needs_proc
def test_the_peak_is_that_of_the_stage_and_not_of_the_run():
    meter = MemoryMeter(CPU, is_on=True)
    with meter.stage("big") as read:
        torch.ones(96 * MIB // 4).sum()
        assert read()["big_mem_cpu_peaked_delta"] > 80 * MIB
    with meter.stage("small") as read:
        peak = read()["small_mem_cpu_peaked_delta"]
    try:
        memory._RESET.write_text("5")
    except OSError:
        pytest.skip("this kernel does not let a process begin a new peak")
    assert peak < 16 * MIB


def test_without_proc_the_kernel_tells_how_much_the_peak_grew(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    meter = MemoryMeter(CPU, is_on=True)
    with meter.stage("train") as read:
        held = torch.ones(8 * MIB // 4)
        metrics = read()
    assert list(metrics) == ["train_mem_cpu_peaked_delta"]
    assert metrics["train_mem_cpu_peaked_delta"] >= 0
    assert held.numel()


def test_a_system_that_tells_nothing_is_an_error_at_construction(make_trainer, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="skip_memory_metrics=False needs a system that tells a process its memory"):
        make_trainer(8, skip_memory_metrics=False)


@needs_proc
def test_after_an_exception_the_next_stage_is_measured(make_trainer):
    class Fails(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            raise KeyError("on purpose")

    trainer = make_trainer(8, trainer_class=Fails, skip_memory_metrics=False, eval_dataset=samples(4))
    with pytest.raises(KeyError):
        trainer.train()
    assert names_in(trainer.evaluate()) == [f"eval_{name}" for name in NAMES]


def test_errors_of_memory_are_distinguished_from_others_by_kind_and_message():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_out_of_memory(MemoryError())


@pytest.mark.cuda
def test_a_cuda_device_tells_its_memory_too(make_trainer):
    class OnDevice(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            if not hasattr(self, "kept"):
                self.kept = torch.ones(16 * MIB // 4, device="cuda")
            torch.ones(64 * MIB // 4, device="cuda").sum()
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = make_trainer(8, trainer_class=OnDevice, model=Classifier(), skip_memory_metrics=False, use_cpu=False)
    metrics = trainer.train().metrics
    assert 16 * MIB <= metrics["train_mem_gpu_alloc_delta"] < 32 * MIB
    assert 40 * MIB < metrics["train_mem_gpu_peaked_delta"] < 80 * MIB
