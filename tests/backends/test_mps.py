"""Train on a Mac's GPU, as far as that can be seen without one: on a device that refuses what it refuses."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from substitute_device import NAME, Away, calls, missing, substitute_for_mps
from test_numbers import Rows

from tr_core import Trainer, TrainingArguments
from tr_core.testing import check_strategy
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.column("mps")


class Network(torch.nn.Module):
    """Takes no number of items: torch has no subclass of a substitute's tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TR_RENDEZVOUS_FILE")


def alone():
    """Forget what launched this process, and return the strategy."""
    for name in LAUNCHED:
        os.environ.pop(name, None)
    return substitute_for_mps()


def keep_promises():
    with alone()() as strategy:
        assert strategy.device.type == NAME
        check_strategy(strategy)
    return calls


def test_the_strategy_keeps_the_promises_of_the_seam():
    """Also where a fused update does not look at the flag that says to leave it out."""
    [[*fused]] = run_ranks(keep_promises, 1)
    assert fused == ["_fused_adamw_"] * 2


def train(folder, on_mac, resume, options):
    """Train through the arguments alone; returns who trained, the logs' numbers and the weights."""
    if on_mac:
        alone()
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=not on_mac,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        log_level="error",
        report_to="none",
        **{"max_steps": 4, "save_strategy": "no", "lr_scheduler_type": "constant", **options},
    )
    rows = [dict(row, labels=row["labels"].clamp(min=0)) for row in Rows(24).rows]
    trainer = Trainer(Network(), args, train_dataset=rows, eval_dataset=rows[:7])
    trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "eval_loss")
    history = [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
    weights = {
        name: value.cpu().clone() for name, value in trainer.strategy.full_state_dict(trainer.model_wrapped).items()
    }
    return type(trainer.strategy).__name__, str(trainer.args.device.type), history, weights


def run(folder, on_mac, resume=None, **options):
    [found] = run_ranks(train, 1, str(folder), on_mac, resume, options, timeout_s=120)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1, "eval_strategy": "steps", "eval_steps": 2},
        {"optim": "sgd", "on_nonfinite": "skip", "weight_decay": 0.1},
    ],
    ids=["accumulating, clipping, evaluating", "skipping"],
)
def test_a_mac_is_chosen_by_default_and_its_numbers_are_those_of_the_cpu(tmp_path, options):
    name, device, history, weights = run(tmp_path / "mac", True, **options)
    assert (name, device) == ("MPS", NAME)
    _, _, expected, expected_weights = run(tmp_path / "cpu", False, **options)
    assert history == pytest.approx(expected, rel=1e-6)  # sums of logged losses are kept in 32 bits there
    assert all(torch.equal(value, expected_weights[key]) for key, value in weights.items())


def test_a_run_on_a_mac_resumes_bit_equal(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = run(tmp_path / "whole", True, **saving)
    run(tmp_path / "two", True, max_steps=2, **saving)
    resumed = run(tmp_path / "two", True, resume=True, **saving)
    assert resumed[2] == whole[2]
    assert all(torch.equal(value, whole[3][key]) for key, value in resumed[3].items())


def overflow():
    """Make three steps under float16, of which the second overflows; returns what they gave and the weights."""
    Away.has_wide_scalars = True
    with alone()(precision="fp16") as strategy:
        model = strategy.prepare(torch.nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        applied, seen = [], []
        for value in (1.0, float("inf"), 1.0):
            with strategy.accumulate(model, sync=True):
                with strategy.autocast():
                    loss = model(torch.full((1, 2), value, device=strategy.device)).sum()
                strategy.backward(loss)
            norm = strategy.clip_grad_norm(model, optimizer, None)
            applied.append(strategy.step(optimizer))
            optimizer.zero_grad()
            seen.append((norm.item(), model.weight.tolist()))
        state = strategy.state_parts(model, optimizer)["scaler"].state_dict()
    assert optimizer._step_supports_amp_scaling is True
    return applied, seen, state["scale"]


def test_an_overflow_of_float16_leaves_out_an_update_that_the_device_would_apply():
    [(applied, seen, scale)] = run_ranks(overflow, 1)
    assert applied == [True, False, True]
    assert seen[0][0] == pytest.approx(3**0.5)
    assert seen[1][1] == seen[0][1] != seen[2][1]
    assert scale == 2.0**15


def lack_an_operation():
    strategy = alone()()
    model = strategy.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU()))
    missing.add("gelu")
    notes = []
    for context in (strategy.accumulate(model, sync=True), strategy.autocast(), contextlib.nullcontext()):
        try:
            with context:
                model(torch.ones(1, 2, device=strategy.device))
        except NotImplementedError as error:
            notes.append(getattr(error, "__notes__", []))
    return notes


def test_an_operation_that_the_device_has_not_is_explained_once():
    [(in_training, in_evaluation, elsewhere)] = run_ranks(lack_an_operation, 1)
    assert in_training == in_evaluation
    assert len(in_training) == 1
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1 in its environment" in in_training[0]
    assert elsewhere == []


def move_again():
    strategy = alone()()
    model = strategy.prepare(torch.nn.Linear(2, 1))
    return strategy.prepare(model) is model


def test_a_model_that_is_on_the_device_already_is_taken():
    assert run_ranks(move_again, 1) == [True]
