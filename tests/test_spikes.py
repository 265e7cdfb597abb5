"""A run that goes back before spoilt steps ends as one on data without their batches, bit by bit."""

import json
import math
import os

import pytest
import torch
from shared.killed import Killed
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import RankError, run_ranks

STEPS, BATCH = 60, 4
KINDS = {"a sample": 1, "a gradient": 2, "a spike": 3}


class Net(nn.Module):
    """Dropout, rows that spoil its loss or its gradient, and a number of samples above which memory runs out."""

    def __init__(self):
        super().__init__()
        self.limit, self.failed = 1000, 0
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x, fault, labels=None):
        logits = self.layers(x)
        if self.training and len(x) > self.limit:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = nn.functional.cross_entropy(logits, labels)
        if (fault == 1).any():
            loss = loss * torch.nan
        if (fault == 2).any():
            loss = loss + (logits.sum() * 0).sqrt() * 0  # 0, with a gradient of 0 times infinity
        if (fault == 3).any():
            loss = loss * 1000
        return {"loss": loss, "logits": logits}


def rows(batches, faults, batch=BATCH):
    """Return so many batches, without those that `faults` maps to None; others have a row with a fault."""
    drawn, found = torch.Generator().manual_seed(1), []
    for number in range(batches):
        for place in range(batch):
            row = {"x": torch.randn(6, generator=drawn), "labels": torch.randint(3, (), generator=drawn)}
            fault = faults.get(number, 0)
            if fault is not None:
                found.append({**row, "fault": torch.tensor(fault if place == batch - 1 else 0)})
    return found


class Shrinks(TrainerCallback):
    """Leaves memory for half a batch from a step on."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step >= self.step:
            model.limit = BATCH // 2


def train(folder, data, options=None, kill_at=None, shrink_at=None):
    """Return weights and losses."""
    given = {
        "max_steps": STEPS,
        "num_train_epochs": 1,
        "per_device_train_batch_size": BATCH,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2,
        "logging_steps": 10,
        "save_steps": 25,
        "snapshot_steps": 7,
        "on_spike": "rewind",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }
    trainer = Trainer(Net(), TrainingArguments(folder, **given | (options or {})), train_dataset=data)
    if kill_at is not None:
        trainer.add_callback(Killed(kill_at))
    if shrink_at is not None:
        trainer.add_callback(Shrinks(shrink_at))
        trainer.model.limit = 1000 if shrink_at else BATCH // 2
    trainer.train(resume_from_checkpoint=os.path.isdir(folder) and any("checkpoint-" in n for n in os.listdir(folder)))
    weights = {name: value.clone() for name, value in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    logs = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    trainer.strategy.close()
    assert trainer.model.failed <= 1  # a size that was found is kept
    return weights, logs


def assert_same(found, wanted):
    assert found[1] == wanted[1]
    assert all(torch.equal(found[0][name], wanted[0][name]) for name in wanted[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "at", [(0,), (41, 42), (35, 58), *(pytest.param((step,), marks=pytest.mark.slow) for step in (3, 40, 59))]
)
def test_the_end_is_that_without_the_batches(kind, at, tmp_path):
    if kind == "a spike" and min(at) < 32:
        pytest.skip("too few losses before it")
    total = STEPS + len(at)
    wanted = train(str(tmp_path / "without"), rows(total, dict.fromkeys(at)))
    assert_same(train(str(tmp_path / "with"), rows(total, dict.fromkeys(at, KINDS[kind]))), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("twice", [False, True])
def test_every_step_of_sixty(kind, twice, tmp_path):
    plain = train(str(tmp_path / "plain"), rows(STEPS, {}))
    for at in range(32 if kind == "a spike" else 0, STEPS):
        faults = (at, min(at + 5, STEPS)) if twice else (at,)
        total = STEPS + len(faults)
        wanted = train(str(tmp_path / f"without {at}"), rows(total, dict.fromkeys(faults)))
        found = train(str(tmp_path / f"with {at}"), rows(total, dict.fromkeys(faults, KINDS[kind])))
        assert_same(found, wanted)
        assert not torch.equal(found[0]["layers.0.weight"], plain[0]["layers.0.weight"])


@pytest.mark.parametrize("kill_at", [pytest.param(30, marks=pytest.mark.slow), 44])
def test_a_resume_before_and_after_a_fault_ends_the_same(kill_at, tmp_path):
    wanted = train(str(tmp_path / "without"), rows(STEPS + 1, {40: None}))
    data, folder = rows(STEPS + 1, {40: 1}), str(tmp_path / "with")
    with pytest.raises(RankError):
        run_ranks(train, 1, folder, data, {}, kill_at)
    assert_same(run_ranks(train, 1, folder, data)[0], wanted)


FULL = {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="replicas"),
        pytest.param({"fsdp": "full_shard"}, id="shards"),
        pytest.param(FULL, id="whole checkpoints", marks=pytest.mark.slow),
    ],
)
def test_a_fault_on_one_rank_of_two(options, tmp_path):
    options = options | {"per_device_train_batch_size": BATCH // 2}
    wanted = run_ranks(train, 2, str(tmp_path / "without"), rows(STEPS + 1, {40: None}), options)
    found = run_ranks(train, 2, str(tmp_path / "with"), rows(STEPS + 1, {40: 1}), options)
    for rank in (0, 1):
        assert found[rank][1] == wanted[rank][1]
    assert_same(found[0], wanted[0])


@pytest.mark.slow
def test_matrices_that_are_divided(tmp_path):
    options = {"parallelism_config": "tp=2", "tp_plan": {"layers.0": "colwise", "layers.3": "rowwise"}}
    wanted = run_ranks(train, 2, str(tmp_path / "without"), rows(STEPS + 1, {40: None}), options)
    assert_same(run_ranks(train, 2, str(tmp_path / "with"), rows(STEPS + 1, {40: 1}), options)[0], wanted[0])


def test_a_run_that_is_spoilt_again_and_again_ends_in_words(tmp_path):
    with pytest.raises(FloatingPointError, match=r"step 11 .*max_rewinds=2"):
        train(str(tmp_path), rows(70, {10: 1, 11: 1, 12: 1}), {"max_rewinds": 2})


def test_a_run_without_faults_has_the_bits_of_one_that_does_not_watch(tmp_path):
    plain = train(str(tmp_path / "plain"), rows(STEPS, {}), {"on_spike": None})
    assert_same(train(str(tmp_path / "watched"), rows(STEPS, {})), plain)


def test_the_place_in_the_data_is_gone_back_to_whatever_a_resume_does(tmp_path):
    options = {"ignore_data_skip": True}
    wanted = train(str(tmp_path / "without"), rows(STEPS + 1, {40: None}), options)
    assert_same(train(str(tmp_path / "with"), rows(STEPS + 1, {40: 1}), options), wanted)


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from self.data


def test_data_without_a_length(tmp_path):
    wanted = train(str(tmp_path / "without"), Stream(rows(STEPS + 1, {40: None})))
    assert_same(train(str(tmp_path / "with"), Stream(rows(STEPS + 1, {40: 1}))), wanted)


def test_every_epoch_leaves_out_the_batch_that_has_the_row(tmp_path):
    options = {"max_steps": -1, "num_train_epochs": 3, "train_sampling_strategy": "random", "ema_decay": 0.9}
    weights, logs = train(str(tmp_path), rows(20, {7: 1}), options)
    assert logs[-1][0] == 50  # 3 x 19 steps, in logs of 10
    assert all(value.isfinite().all() for value in weights.values())


def test_an_epoch_of_one_step_may_be_left_out(tmp_path):
    options = {"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 8, "save_steps": 500}
    weights, _ = train(str(tmp_path), rows(2, {0: 2}), options | {"max_rewinds": 3, "logging_steps": 1})
    assert all(value.isfinite().all() for value in weights.values())


def test_a_run_by_epochs_makes_its_last_save(tmp_path):
    options = {"max_steps": -1, "save_steps": 500}
    train(str(tmp_path), rows(20, {7: 1}), options)
    assert [name for name in os.listdir(tmp_path) if name.startswith("checkpoint-")] == ["checkpoint-19"]


class Grows:
    """Adds a layer to the model, and its parameters to the optimizer, after ten steps."""

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == 10:
            model.more = nn.Linear(3, 3)
            optimizer.add_param_group({"params": list(model.more.parameters())})


def test_a_model_that_grows_is_watched_further(tmp_path):
    args = TrainingArguments(
        str(tmp_path),
        on_spike="rewind",
        max_steps=30,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        train_sampling_strategy="sequential",
        use_cpu=True,
    )
    trainer = Trainer(Net(), args, train_dataset=rows(80, {20: 1}), callbacks=[Grows()])
    trainer.train()
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_elastic_runs_leave_out_the_same(tmp_path):
    options = {"elastic": "bitwise", "virtual_shards": 2, "per_device_train_batch_size": BATCH // 2}
    data = rows(STEPS + 1, {40: 1})
    one = run_ranks(train, 1, str(tmp_path / "1"), data, options)[0]
    assert_same(run_ranks(train, 2, str(tmp_path / "2"), data, options)[0], one)


AUTO = {"auto_find_batch_size": True}
HALF = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2}
# The step where memory runs out, that of the fault, and that from which the clean run has smaller micro-batches:
# snapshots are those of steps 25, 32 and 39, and the steps after the one gone back to are made again with them.
ORDERS = {
    "memory, a snapshot, a fault": (36, 40, 36),
    "memory, then a fault": (35, 37, 32),
    "memory in the step of the fault": (37, 37, 32),
    "a fault, then memory before it is seen": (38, 37, 32),
    "a fault, then memory": (45, 20, 45),
    "a fault, then memory in a step that is made again": (26, 30, 25),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("memory", "fault", "smaller"), ORDERS.values(), ids=ORDERS)
def test_memory_that_runs_out_as_well(memory, fault, smaller, kind, tmp_path):
    if kind == "a spike" and fault < 32:
        pytest.skip("too few losses before it")
    wanted = train(str(tmp_path / "without"), rows(STEPS + 1, {fault: None}), AUTO, None, smaller)
    found = train(str(tmp_path / "with"), rows(STEPS + 1, {fault: KINDS[kind]}), AUTO, None, memory)
    assert_same(found, wanted)
    state = json.loads((tmp_path / "with/checkpoint-50/trainer_state.json").read_text())
    assert state["train_batch_size"] == BATCH // 2


def test_memory_that_runs_out_in_the_first_step(tmp_path):
    wanted = train(str(tmp_path / "without"), rows(STEPS + 1, {40: None}), HALF)
    assert_same(train(str(tmp_path / "with"), rows(STEPS + 1, {40: 1}), AUTO, None, 0), wanted)
    stream = train(str(tmp_path / "stream"), Stream(rows(STEPS + 1, {40: 1})), AUTO, None, 0)
    assert_same(stream, train(str(tmp_path / "clean"), Stream(rows(STEPS + 1, {40: None})), HALF))
    whole = train(str(tmp_path / "whole"), rows(STEPS + 1, {40: None}))  # the same sums in another order
    assert dict(whole[1]) == pytest.approx(dict(wanted[1]), rel=1e-5)
    assert whole[1] != wanted[1]


@pytest.mark.slow
def test_a_common_size_of_two_ranks_and_a_fault(tmp_path):
    wanted = run_ranks(train, 2, str(tmp_path / "without"), rows(STEPS + 1, {40: None}, 2 * BATCH), HALF)
    data = rows(STEPS + 1, {40: 1}, 2 * BATCH)
    assert_same(run_ranks(train, 2, str(tmp_path / "with"), data, AUTO, None, 0)[0], wanted[0])


def test_a_resume_after_both(tmp_path):
    wanted = train(str(tmp_path / "without"), rows(STEPS + 1, {40: None}), AUTO, None, 36)
    data, folder = rows(STEPS + 1, {40: 1}), str(tmp_path / "with")
    with pytest.raises(RankError):
        run_ranks(train, 1, folder, data, AUTO, 55, 36)
    assert_same(run_ranks(train, 1, folder, data, AUTO, None, 0)[0], wanted)


@pytest.mark.parametrize("hides", [True, False], ids=["its default", "logging_nan_inf_filter=False"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_goes_on_with_what_a_fault_leaves(kind, hides, tmp_path):
    """It has no way back: weights are NaN to the end, and its log says 0 by default; a spike stays in the weights."""
    import transformers

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    common = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": 1e-2, "logging_steps": 10}
    common |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}

    def weights_and_losses(data):
        args = transformers.TrainingArguments(str(tmp_path), **common, logging_nan_inf_filter=hides)
        trainer = InOrder(Net(), args, train_dataset=data)
        trainer.train()
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        return trainer.model.state_dict(), losses

    weights, losses = weights_and_losses(rows(STEPS + 1, {40: KINDS[kind]}))
    clean, usual = weights_and_losses(rows(STEPS + 1, {40: None}))
    assert losses[:4] == usual[:4]
    if kind == "a spike":
        assert losses[4] > 50 * usual[4]
        assert not any(torch.equal(weights[name], clean[name]) for name in clean)
    else:
        assert all(value.isnan().all() for value in weights.values())
        assert losses[5] == 0 if hides else math.isnan(losses[5])
