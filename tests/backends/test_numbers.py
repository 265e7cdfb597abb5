"""Train on a backend in several processes: the numbers are those of one process, and nothing is used twice."""

import contextlib
import itertools
import shutil

import pytest
import torch
from shared.callbacks import Stop, StopAt
from shared.data import SeenRows, rows
from torch import nn
from variants import FARTHER, ONE_PROCESS, TOLERANCE, VARIANTS, run_on, shared, together

from tr_core import Trainer, TrainingArguments

# Every change runs the others.
LEFT_TO_ITS_BACKEND = ("offload",)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.layers(x)
        if num_items_in_batch is not None and self.counts:
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        else:
            loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}

    counts = False


class Counting(Network):
    counts = True


class Rows(SeenRows):
    """Every fourth row has no label that counts."""

    def __init__(self, number):
        super().__init__(
            [row if i % 4 else {**row, "labels": torch.tensor(-100)} for i, row in enumerate(rows(number))]
        )


def train(folder, model_name, number, options, stop_at=None, resume=None, **given):
    """Run in every rank; returns what the test compares. What else is given goes to the Trainer."""
    data = Rows(number)
    if model_name == "Network":
        for row in data.rows:
            row["labels"] = row["labels"].clamp(min=0)
    args = TrainingArguments(
        output_dir=folder,
        learning_rate=1e-2,
        logging_steps=2,
        disable_tqdm=True,
        log_level="error",
        per_device_eval_batch_size=2,
        eval_strategy="epoch",
        **{"use_cpu": True, "optim": "sgd", "save_strategy": "no", "num_train_epochs": 2, **options},
    )
    trainer = Trainer(
        {"Network": Network, "Counting": Counting}[model_name](),
        args,
        train_dataset=data,
        eval_dataset=Rows(7).rows
        if model_name == "Counting"
        else [dict(r, labels=r["labels"].clamp(min=0)) for r in Rows(7).rows],
        compute_metrics=lambda p: {"rows": len(p.predictions), "first": float(p.predictions[:, 0].sum())},
        callbacks=[StopAt(stop_at)] if stop_at else [],
        **given,
    )
    with contextlib.suppress(Stop):
        trainer.train(resume_from_checkpoint=resume)
    seen = list(data.seen)
    history = [
        {k: v for k, v in entry.items() if not k.endswith(("runtime", "per_second"))}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    result = history, {name: value.detach().cpu().clone() for name, value in weights.items()}, seen
    trainer.strategy.close()
    return result


def assert_close(one, other, tolerance):
    assert [sorted(entry) for entry in one[0]] == [sorted(entry) for entry in other[0]]
    for mine, theirs in zip(one[0], other[0], strict=True):
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name
    for name, mine in one[1].items():  # empty on ranks that have shards only
        torch.testing.assert_close(mine, other[1][name], rtol=tolerance, atol=tolerance)


ALONE = {"strategy": "single", "fsdp": "", "fsdp_config": {}, "deepspeed": None}


def assert_same_bits(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def tolerance_of(variant):
    return TOLERANCE * FARTHER.get(variant, 1)


@pytest.mark.row("numbers")
@pytest.mark.parametrize(
    ("model_name", "world_size", "accumulation"),
    [
        pytest.param(*case, marks=[] if case in (("Network", 2, 1), ("Counting", 3, 2)) else pytest.mark.slow)
        for case in itertools.product(["Network", "Counting"], [2, 3], [1, 2])
    ],
)
def test_ranks_give_the_numbers_of_one_process(tmp_path, variant, model_name, world_size, accumulation):
    # The last micro-batch has 7 samples: ranks hold unequal shares of it. One process has no micro-batch less for it.
    total, number = 12, 48 if variant in ONE_PROCESS else 43
    together = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": total}
    alone = train(str(tmp_path / "1"), model_name, number, together)
    options = shared(variant, total, world_size, accumulation)
    ranks = run_on(variant, train, world_size, str(tmp_path / "n"), model_name, number, options)
    assert ranks[0][1].keys() == alone[1].keys()
    for rank in ranks:
        assert_close(rank, alone, tolerance_of(variant))
        assert rank[0] == ranks[0][0]
        assert all(torch.equal(value, ranks[0][1][name]) for name, value in rank[1].items())


@pytest.mark.row("short")
@pytest.mark.parametrize("model_name", ["Network", "Counting"])
@pytest.mark.parametrize("number", [26, pytest.param(38, marks=pytest.mark.slow)])
def test_a_rank_that_is_left_without_a_sample_adds_nothing(tmp_path, variant, model_name, number):
    """The last micro-batch has two samples for three ranks."""
    if variant in ONE_PROCESS:
        pytest.skip("impossible: it is one process")
    alone = train(str(tmp_path / "1"), model_name, number, {"per_device_train_batch_size": 12})
    options = shared(variant, 12, 3)
    for rank in run_on(variant, train, 3, str(tmp_path / "n"), model_name, number, options):
        assert_close(rank, alone, tolerance_of(variant))


@pytest.mark.row("once")
@pytest.mark.parametrize("number", [40, 43])
def test_every_sample_is_used_once_an_epoch(tmp_path, variant, number):
    options = {**shared(variant, 8, 2), "num_train_epochs": 3}
    ranks = run_on(variant, train, 2, str(tmp_path), "Network", number, options)
    by_data_rank = [rank[2] for rank in ranks[:: together(variant)]]
    assert sorted(index for seen in by_data_rank for index in seen) == sorted(list(range(number)) * 3)
    assert len({index for seen in by_data_rank for index in seen[:4]}) == 4 * len(by_data_rank)
    assert [rank[2] for rank in ranks] == [seen for seen in by_data_rank for _ in range(together(variant))]


@pytest.mark.row("resume")
def test_a_run_of_two_ranks_resumes_bit_equal(tmp_path, variant):
    options = {**shared(variant, 8, 2), "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch"}
    alone = run_on(variant, train, 2, str(tmp_path / "a"), "Network", 40, options)
    run_on(variant, train, 2, str(tmp_path / "b"), "Network", 40, options, 8)
    resumed = run_on(variant, train, 2, str(tmp_path / "b"), "Network", 40, options, None, True)
    for one, other in zip(alone, resumed, strict=True):
        assert_same_bits(one, other)


@pytest.mark.row("resize")
def test_a_run_of_two_ranks_goes_on_with_another_number_at_the_next_sample(tmp_path, variant):
    """A run of one process goes on with replicas."""
    steps = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1, "gradient_accumulation_steps": 1}
    alone = train(str(tmp_path / "1"), "Network", 144, {**steps, **ALONE, "per_device_train_batch_size": 12})
    number = 1 if variant in ONE_PROCESS else 2
    two = {**VARIANTS[variant], **steps, "per_device_train_batch_size": 12 // number}
    first = run_on(variant, train, number, str(tmp_path / "2"), "Network", 144, two, 3)
    other = "ddp" if variant in ONE_PROCESS else variant
    for world_size in (1, 3, 4) if number == 2 else (2, 3):
        shutil.copytree(tmp_path / "2", folder := tmp_path / f"{world_size}-of-2")
        resized = {**VARIANTS[other], **steps, "per_device_train_batch_size": 12 // world_size}
        second = run_on(other, train, world_size, str(folder), "Network", 144, resized, None, True)
        # Three steps of six samples; a fourth step's may have been loaded already when the run was stopped.
        used = [index for rank in first[:: together(variant)] for index in rank[2][: 36 // number]]
        used += [index for rank in second[:: together(other)] for index in rank[2]]
        assert sorted(used) == list(range(144))
        assert_close(second[0], alone, tolerance_of(variant))
