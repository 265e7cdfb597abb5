"""A step that failed leaves nothing behind: what the same Trainer trains after it is what it would have been."""

import copy
import itertools

import pytest
import torch
from shared.callbacks import Clears
from test_scenarios import trainer_of
from variants import BACKEND_OF, run_on, shared

from tr_dist.testing import run_ranks


def train(folder, options, error=None, at=None, layer=2):
    """Return losses, norms and weights of a run; one forward fails at a layer, in a run before it or in its own."""
    trainer = trainer_of(folder, options)
    calls = itertools.count()

    def fail(module, inputs):
        if next(calls) == at:
            raise error

    trainer.model.layers[layer].register_forward_pre_hook(fail)
    if isinstance(error, ArithmeticError):
        with pytest.raises(ArithmeticError):
            trainer.train()
    trainer.train()
    logs = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    kept = {name: value.detach().cpu().clone() for name, value in weights.items()}
    trainer.strategy.close()
    return logs, kept


def test_a_run_after_one_that_failed_has_the_same_bits(tmp_path, variant):
    options = shared(variant, 4, 2, accumulation=3)
    logs, weights = run_on(variant, train, 2, str(tmp_path / "alone"), options)[0]
    found, of_failed = run_on(variant, train, 2, str(tmp_path / "failed"), options, ArithmeticError(), 1)[0]
    assert found == logs
    assert all(torch.equal(of_failed[name], value) for name, value in weights.items())


@pytest.mark.column("deepspeed")
def test_weights_that_are_half_gathered_by_zero_3_are_refused(tmp_path):
    pytest.importorskip("deepspeed")
    options = shared("zero_3", 4, 2, accumulation=3)
    with pytest.raises(Exception, match="left weights half gathered"):
        run_on("zero_3", train, 2, str(tmp_path), options, ArithmeticError(), 2, 0)


MEMORY = {
    "full_shard": {"fsdp": "full_shard"},
    "bf16": {"fsdp": "full_shard", "bf16": True},
    "zero_1": {"deepspeed": {"zero_optimization": {"stage": 1}}},
    "zero_2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.column(BACKEND_OF.get(k, "fsdp"))) for k in MEMORY])
def test_memory_that_runs_out_between_micro_batches_of_one_process_leaves_no_gradient(tmp_path, kind):
    if "deepspeed" in MEMORY[kind]:
        pytest.importorskip("deepspeed")
    options = {**MEMORY[kind], "gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}
    arguments = ({**options, "auto_find_batch_size": True}, torch.OutOfMemoryError("CUDA out of memory."), 4)
    if kind == "zero_2":
        with pytest.raises(Exception, match="which ZeRO stage 2 holds; set per_device_train_batch_size"):
            run_ranks(train, 1, str(tmp_path / "less"), *arguments, timeout_s=100)
        return
    [(logs, _)] = run_ranks(train, 1, str(tmp_path / "alone"), options, timeout_s=100)
    [(found, _)] = run_ranks(train, 1, str(tmp_path / "less"), *arguments, timeout_s=100)
    assert [*itertools.chain(*found)] == pytest.approx([*itertools.chain(*logs)], rel=2e-3 if kind == "bf16" else 1e-5)


KEEPING = {
    "elastic": ({}, "what it drops would depend on the number of processes"),
    "elastic shards": ({"fsdp": "full_shard"}, "what it drops would depend on the number of processes"),
    "zero_2": ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "which ZeRO stage 2 holds"),
}


def clear(folder, options, owner):
    trainer = trainer_of(folder, options, [clears := Clears(owner)])
    with pytest.raises(RuntimeError, match="zero_grad") as found:
        trainer.train()
    trainer.remove_callback(clears)
    trainer.model.zero_grad()  # the run is over, and with it the step
    trainer.train()  # the error, whose frames are in the step still, says nothing of another run
    if "fsdp" not in options:
        copied = copy.deepcopy(trainer.model)
        next(copied.parameters()).sum().backward()
        copied.zero_grad()
        assert all(parameter.grad is None for parameter in copied.parameters())
    return str(found.value)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.column("deepspeed" if "zero" in k else "fsdp")) for k in KEEPING]
)
@pytest.mark.parametrize("owner", ["optimizer", "model"])
def test_gradients_that_a_backend_keeps_until_the_step_cannot_be_dropped_within_it(tmp_path, kind, owner):
    options, said = KEEPING[kind]
    if "deepspeed" in options:
        pytest.importorskip("deepspeed")
    else:
        options = {**options, "elastic": "bitwise", "virtual_shards": 4, "optim": "adamw_torch"}
    options = {**options, "gradient_accumulation_steps": 2}
    assert all(said in words for words in run_ranks(clear, 2, str(tmp_path), options, owner, timeout_s=100))
