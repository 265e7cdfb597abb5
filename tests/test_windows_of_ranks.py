"""What several ranks log together: metrics, tokens, and steps that are not finite; and how an open window resumes."""

import contextlib
import math

import pytest
import torch
from shared.callbacks import Stop, StopAt
from shared.data import rows
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks
from tr_log.report.run_folder import RunFolder

BAD = 777.0  # features of this value make a batch's loss NaN
INFINITE = 555.0  # and of this one infinite, with finite gradients


class Network(nn.Module):
    main_input_name = "x"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        logits = self.layers(torch.where(x > 500, 0.0, x))
        loss = nn.functional.cross_entropy(logits, labels) + torch.where((x == INFINITE).any(), math.inf, 0.0)
        return {"loss": loss * torch.where((x == BAD).any(), math.nan, 1.0), "logits": logits}


class LogsMore(Trainer):
    """Logs metrics of each batch from `compute_loss`, and returns a loss of two parts."""

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        logits, loss = outputs["logits"], outputs["loss"]
        rows = len(logits)
        self.log_metric("positive", (logits > 0).double().mean(), rows)
        self.log_metric("rows", float(rows))
        if self.strategy.world_size > 1:
            self.log_metric(f"of rank {self.strategy.rank}", float(self.strategy.rank))
        parts = {"loss": loss * 1.5, "ce": loss, "half": loss * 0.5}
        return (parts, outputs) if return_outputs else parts


def make_rows(number, bad=(), fault=BAD):
    made = rows(number)
    for index in bad:
        made[index]["x"] = torch.full((8,), fault)
    return made


def train(folder, number, options, bad=(), stop_at=None, resume=None, fault=BAD):
    """Run in every rank; returns the log, the weights, the tokens and what ended the run."""
    arguments = {
        "output_dir": folder,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "include_num_input_tokens_seen": "all",
        **options,
    }
    trainer = LogsMore(
        Network(),
        TrainingArguments(**arguments),
        train_dataset=make_rows(number, bad, fault),
        eval_dataset=make_rows(7),
        callbacks=[] if stop_at is None else [StopAt(stop_at)],
    )
    error = None
    with contextlib.suppress(Stop):
        try:
            trainer.train(resume_from_checkpoint=resume)
        except FloatingPointError as caught:
            error = str(caught)
    history = [
        {k: v for k, v in entry.items() if not k.endswith(("runtime", "per_second"))}
        for entry in trainer.state.log_history
    ]
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.strategy.close()
    return history, weights, trainer.state.num_input_tokens_seen, error


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("number", [16, 18, 17])
def test_metrics_and_tokens_of_two_ranks_are_those_of_one_process(tmp_path, number, accumulation):
    """With 17 rows the second rank is left without one in the last micro-batch."""
    options = {"gradient_accumulation_steps": accumulation}
    alone = train(str(tmp_path / "1"), number, {**options, "per_device_train_batch_size": 4})
    ranks = run_ranks(train, 2, str(tmp_path / "n"), number, options, timeout_s=120)
    assert ranks[0][0] == ranks[1][0], "every rank logs the same"
    history = ranks[0][0]
    assert alone[2] == ranks[0][2] == ranks[1][2] == number * 8
    assert len(history) == len(alone[0])
    for mine, theirs in zip(history, alone[0], strict=True):
        shared = [name for name in theirs if name not in ("rows", "eval_rows")]
        assert {name: mine[name] for name in shared} == pytest.approx({name: theirs[name] for name in shared}, rel=1e-5)
        if "loss" in mine:
            assert mine["ce"] + mine["half"] == pytest.approx(mine["loss"], rel=1e-6)
            assert mine["of rank 0"] == 0.0
    assert any(entry.get("of rank 1") == 1.0 for entry in history)
    (evaluated,) = [entry for entry in history if "eval_loss" in entry]
    assert evaluated["eval_ce"] + evaluated["eval_half"] == pytest.approx(evaluated["eval_loss"], rel=1e-6)
    assert evaluated["eval_of rank 1"] == 1.0


def test_the_events_have_what_each_rank_spent_its_time_on(tmp_path):
    run_ranks(train, 2, str(tmp_path), 16, {}, timeout_s=120)
    (session,) = RunFolder.read(tmp_path).sessions
    for place, phases in session.processes:
        assert place == ""
        assert {"start", "compute", "evaluation"} <= set(phases)
        assert 0 < sum(phases.values()) <= session.end_s - session.start_s
    assert len(session.processes) == 2


def test_a_trial_of_what_fits_into_memory_logs_nothing(tmp_path):
    """Two ranks compute the gradients of a micro-batch before the first step, to agree on its size."""
    plain = run_ranks(train, 2, str(tmp_path / "a"), 16, {}, timeout_s=120)
    tried = run_ranks(train, 2, str(tmp_path / "b"), 16, {"auto_find_batch_size": True}, timeout_s=120)
    assert plain[0][0] == tried[0][0]


@pytest.mark.parametrize(
    ("optim", "fault"), [("adamw_torch_fused", BAD), ("adamw_torch_fused", INFINITE), ("sgd", BAD)]
)
def test_a_sample_that_is_bad_on_one_rank_has_both_skip_the_step(tmp_path, optim, fault):
    """Steps of four rows, two a rank: row 5 is the first rank's in the second step, row 10 the other's in the third."""
    options = {"on_nonfinite": "skip", "optim": optim, "lr_scheduler_type": "constant"}
    ranks = run_ranks(train, 2, str(tmp_path / "n"), 20, options, (5, 10), None, None, fault, timeout_s=120)
    assert repr(ranks[0][0]) == repr(ranks[1][0])  # the norm of a skipped step is NaN
    assert same_bits(ranks[0][1], ranks[1][1])
    entries = [entry for entry in ranks[0][0] if "loss" in entry]
    assert [entry["skipped_steps"] for entry in entries] == [1, 1]
    assert all(math.isfinite(entry["loss"]) for entry in entries)
    for entry in entries:
        assert entry["ce"] + entry["half"] == pytest.approx(entry["loss"], rel=1e-6)
    without = {**options, "on_nonfinite": "log", "max_steps": 3, "train_sampling_strategy": "sequential"}
    rows_of_good_steps = [0, 1, 2, 3, *range(12, 20)]
    expected = run_ranks(train_on, 2, str(tmp_path / "m"), rows_of_good_steps, without, timeout_s=120)
    assert same_bits(ranks[0][1], expected[0])


def train_on(folder, indices, options):
    """Train on some of twenty rows and return the weights."""
    made = make_rows(20)
    arguments = {"output_dir": folder, "learning_rate": 1e-2, "disable_tqdm": True, "log_level": "error"}
    more = {"use_cpu": True, "per_device_train_batch_size": 2, "save_strategy": "no", **options}
    trainer = LogsMore(Network(), TrainingArguments(**arguments, **more), train_dataset=[made[i] for i in indices])
    trainer.train()
    trainer.strategy.close()
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_a_sample_that_is_bad_on_one_rank_has_both_raise_the_same(tmp_path):
    options = {"on_nonfinite": "raise", "logging_steps": 4}
    ranks = run_ranks(train, 2, str(tmp_path / "n"), 32, options, (10,), timeout_s=120)
    messages = [rank[3] for rank in ranks]
    assert messages[0] == messages[1]
    assert messages[0].startswith("step 3: the loss is 1.")
    assert " on rank 0, nan on rank 1, the gradient norm nan; gradients that are not finite: layers.0" in messages[0]
    assert same_bits(ranks[0][1], ranks[1][1])
    assert all(tensor.isfinite().all() for tensor in ranks[0][1])


# An open window, saved and resumed


@pytest.mark.parametrize("policy", ["log", "skip"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_log_after_a_resume_is_what_it_would_have_been(tmp_path, accumulation, policy):
    """Saved after three steps, in the middle of a window of five; the second of its steps is bad."""
    options = {
        "gradient_accumulation_steps": accumulation,
        "logging_steps": 5,
        "save_strategy": "steps",
        "save_steps": 3,
        "on_nonfinite": policy,
        "num_train_epochs": 2,
    }
    bad = (3 * accumulation,) if policy == "skip" else ()
    whole = train(str(tmp_path / "a"), 20 * accumulation, options, bad)
    train(str(tmp_path / "b"), 20 * accumulation, options, bad, 4)
    resumed = train(str(tmp_path / "b"), 20 * accumulation, options, bad, None, True)
    # The mean loss of a run is that of its own call.
    last = [{k: v for k, v in run[0][-1].items() if k != "train_loss"} for run in (whole, resumed)]
    assert (whole[0][:-1], last[0]) == (resumed[0][:-1], last[1])
    assert same_bits(whole[1], resumed[1])
    assert whole[2] == resumed[2] == 2 * 20 * accumulation * 8
    first = whole[0][0]
    assert (first["step"], first.get("skipped_steps", 0)) == (5, 1 if policy == "skip" else 0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_window_of_two_ranks_goes_on_with_as_many_or_fewer(tmp_path, world_size):
    options = {"logging_steps": 4, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}
    whole = run_ranks(train, 2, str(tmp_path / "a"), 24, options, timeout_s=120)
    run_ranks(train, 2, str(tmp_path / "b"), 24, options, (), 3, timeout_s=120)
    changes = {"per_device_train_batch_size": 4 // world_size}
    resumed = run_ranks(
        train, world_size, str(tmp_path / "b"), 24, {**options, **changes}, (), None, True, timeout_s=120
    )
    mine, theirs = resumed[0][0][0], whole[0][0][0]
    assert (mine["step"], theirs["step"]) == (4, 4)
    names = ["loss", "positive", "ce", "half", "num_input_tokens_seen"]
    if world_size == 2:
        assert mine == theirs
    assert {name: mine[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-5)


def test_nothing_that_is_not_finite_is_saved(tmp_path):
    """The bad step is the fourth, and saves are due after the third and the sixth."""
    options = {"on_nonfinite": "raise", "save_strategy": "steps", "save_steps": 3, "logging_strategy": "no"}
    error = train(str(tmp_path), 32, {**options, "optim": "sgd"}, (6,))[3]
    assert error.startswith("step 4: the loss is nan")
    assert "SGD cannot leave out an update" in error
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3"]
    resumed = train(str(tmp_path), 32, {**options, "on_nonfinite": "skip"} | {"optim": "sgd"}, (6,), None, True)
    assert all(tensor.isfinite().all() for tensor in resumed[1])
