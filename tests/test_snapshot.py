"""A snapshot in memory is restored into a run that was just built in another process, which ends with the same bits."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist
from shared.callbacks import Stop
from shared.data import rows
from torch import nn
from torch.utils._pytree import tree_leaves

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.snapshot import Snapshot
from tr_dist.testing import RankError, run_ranks

AT, STEPS, SAMPLES = 23, 40, 96


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Takes(TrainerCallback):
    """Takes a snapshot at a step, and pickles it."""

    def __init__(self, trainer):
        self.trainer, self.snapshot, self.pickled = trainer, Snapshot(), b""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == AT:
            self.snapshot.take(self.trainer.current_run)
            self.pickled = pickle.dumps(self.snapshot)


class Restores(TrainerCallback):
    """Restores a pickled snapshot where training begins."""

    def __init__(self, trainer, pickled):
        self.trainer, self.pickled = trainer, pickled

    def on_train_begin(self, args, state, control, **kwargs):
        pickle.loads(self.pickled).restore(self.trainer.current_run)


def build(folder, options):
    given = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 10}
    given |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "log_level": "error", "ema_decay": 0.9}
    args = TrainingArguments(folder, **given | {"report_to": "none"} | options)
    return Trainer(Net(), args, train_dataset=rows(SAMPLES))


def train(folder, options, pickled=None):
    """Run in every rank; return weights, log, mean loss, and what was taken on the way."""
    trainer = build(folder, options)
    known = Takes(trainer) if pickled is None else Restores(trainer, pickled)
    trainer.add_callback(known)
    mean = trainer.train().training_loss
    weights = {name: value.clone() for name, value in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    logs = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    trainer.strategy.close()
    return weights, logs, mean, known.pickled


def assert_same(found, wanted):
    assert found[1:3] == wanted[1:3]
    assert all(torch.equal(found[0][name], wanted[0][name]) for name in wanted[0])


ELASTIC = {"elastic": "bitwise", "virtual_shards": 2}
CASES = {
    "one": (1, 1, {"per_device_train_batch_size": 4}),
    "two": (2, 2, {}),
    "two to one": (2, 1, ELASTIC),
    "one to two": (1, 2, ELASTIC),
    "shards": (2, 2, {"fsdp": "full_shard", "ema_decay": None}),
}


@pytest.mark.parametrize(("before", "after", "options"), CASES.values(), ids=CASES)
def test_a_run_of_other_processes_goes_on(before, after, options, tmp_path):
    wanted = run_ranks(train, before, str(tmp_path / "whole"), options)
    assert wanted[0][1][-1][0] == STEPS
    if before == after:  # each rank from its own
        found = run_ranks(train_own, after, str(tmp_path / "on"), options, [each[3] for each in wanted])
    else:  # all from that of the first
        found = run_ranks(train, after, str(tmp_path / "on"), options, wanted[0][3])
    assert_same(found[0], wanted[0])


def train_own(folder, options, pickled):
    return train(folder, options, pickled[int(os.environ.get("RANK", "0"))])


def test_shards_of_another_number_of_ranks_are_refused(tmp_path):
    options = {"fsdp": "full_shard", "ema_decay": None}
    taken = run_ranks(train, 2, str(tmp_path / "two"), options)[0][3]
    with pytest.raises(ValueError, match=r"holds the shard of .* no mesh.* resume from a checkpoint"):
        train(str(tmp_path / "one"), {"ema_decay": None}, taken)


def test_another_run_is_refused(tmp_path):
    taken = train(str(tmp_path / "taken"), {})[3]
    with pytest.raises(ValueError, match="do not have the same parts"):
        train(str(tmp_path / "other"), {"ema_decay": None}, taken)
    with pytest.raises(ValueError, match="optimizer was AdamW .* and is SGD now"):
        train(str(tmp_path / "optimizer"), {"optim": "sgd"}, taken)
    with pytest.raises(ValueError, match="no snapshot was taken"):
        train(str(tmp_path / "none"), {}, pickle.dumps(Snapshot()))


class Leaves(Takes):
    """One rank ends at a step, where the other takes another snapshot."""

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == AT + 5:
            if args.process_index == 1:
                dist.destroy_process_group()
                os._exit(0)
            try:
                self.snapshot.take(self.trainer.current_run)
            except RuntimeError:
                raise Stop from None


def train_and_leave(folder, told):
    trainer = build(folder, {})
    leaves = Leaves(trainer)
    trainer.add_callback(leaves)
    try:
        trainer.train()
    except Stop:
        with open(told, "wb") as file:
            pickle.dump((leaves.snapshot, leaves.pickled), file)


def values(snapshot):
    leaves = tree_leaves(vars(snapshot))
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in leaves]


def test_the_former_one_is_held_if_another_rank_is_gone(tmp_path):
    with pytest.raises(RankError):
        run_ranks(train_and_leave, 2, str(tmp_path / "two"), str(tmp_path / "told"), timeout_s=60)
    held, taken = pickle.loads((tmp_path / "told").read_bytes())
    assert held.step == AT
    assert values(held) == values(pickle.loads(taken))
    assert len(values(held)) > 100


class AsksToStop(TrainerCallback):
    """Asks at a step, as early stopping does."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == AT


def test_what_was_asked_of_the_run_then_is_asked_again(tmp_path):
    taker = build(str(tmp_path / "one"), {})
    taken = Takes(taker)
    taker.add_callback(AsksToStop())
    taker.add_callback(taken)
    taker.train()
    goes_on = build(str(tmp_path / "two"), {})
    goes_on.add_callback(Restores(goes_on, taken.pickled))
    assert goes_on.train().global_step == taker.state.global_step == AT
