"""A run with a list of samples to leave out has the bits of one on a `Subset` of all others."""

import json
import os

import pytest
import torch
from shared.models import Classifier
from torch.utils.data import IterableDataset, Subset, WeightedRandomSampler

from tr_core import Trainer, TrainingArguments, set_seed
from tr_dist.testing import run_ranks

OUT = (0, 7, 8, 21, 46)


def rows(number=47):
    drawn = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(8, generator=drawn),
            "labels": torch.randint(2, (), generator=drawn),
            "length": int(torch.randint(1, 9, (), generator=drawn)),
        }
        for _ in range(number)
    ]


class Weighted(Trainer):
    """Draws samples by their length."""

    def _get_train_sampler(self, train_dataset=None):
        weights = [float(row["length"]) for row in train_dataset]
        return WeightedRandomSampler(weights, len(weights), generator=torch.Generator().manual_seed(3))


def build(folder, data, options, kind=Trainer):
    given = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_steps": 4,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }
    set_seed(7)
    return kind(Classifier(), TrainingArguments(folder, **given | options), train_dataset=data)


class Ends:
    """Ends a run after six steps, of which four are in a checkpoint."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            raise InterruptedError


def train(folder, data, options, kind=Trainer, ends=None, closes=True):
    """Return weights and losses."""
    trainer = build(folder, data, options, kind)
    if ends is not None:
        trainer.add_callback(ends)
    trainer.train(resume_from_checkpoint=os.path.isdir(folder) and any("checkpoint-" in n for n in os.listdir(folder)))
    logs = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    if closes:
        trainer.strategy.close()
    return weights, logs


def listed(path, indices, **held):
    path.write_text(json.dumps({"samples": [{"index": index} for index in indices], **held}))
    return {"leave_out_samples": str(path)}


def others(data, out=OUT):
    return Subset(data, [index for index in range(len(data)) if index not in out])


def assert_same(found, wanted):
    assert found[1] == wanted[1]
    assert all(torch.equal(found[0][name], wanted[0][name]) for name in wanted[0])


ORDERS = {
    "random": ({}, Trainer),
    "sequential": ({"train_sampling_strategy": "sequential"}, Trainer),
    "by length": ({"train_sampling_strategy": "group_by_length"}, Trainer),
    "computed": ({"train_sampling_strategy": "random_computed", "dataloader_drop_last": True}, Trainer),
    "weighted": ({}, Weighted),
}
FAST = ("random", "weighted")


@pytest.mark.parametrize(
    "order", [pytest.param(each, marks=[pytest.mark.slow] * (each not in FAST)) for each in ORDERS]
)
def test_the_run_is_that_on_a_subset_also_when_it_is_resumed(order, tmp_path):
    options, kind = ORDERS[order]
    data, leave_out = rows(), listed(tmp_path / "out.json", OUT, number_of_samples=47)
    unsaved = options | {"save_strategy": "no"}
    wanted = train(str(tmp_path / "subset"), others(data), unsaved, kind)
    assert_same(train(str(tmp_path / "list"), data, unsaved | leave_out, kind), wanted)
    with pytest.raises(InterruptedError):
        train(str(tmp_path / "killed"), data, options | leave_out, kind, Ends())
    assert_same(train(str(tmp_path / "killed"), data, options | leave_out, kind), wanted)
    plain = train(str(tmp_path / "plain"), data, unsaved, kind)
    assert any(not torch.equal(plain[0][name], wanted[0][name]) for name in wanted[0])


def all_ways(folder, options, leave_out):
    """Return the run on a subset, that with a list, and that with a list that was resumed."""
    data = rows()
    with pytest.raises(InterruptedError):
        train(f"{folder}/resumed", data, options | leave_out, ends=Ends(), closes=False)
    return [
        train(f"{folder}/subset", others(data), options, closes=False),
        train(f"{folder}/list", data, options | leave_out, closes=False),
        train(f"{folder}/resumed", data, options | leave_out),
    ]


@pytest.mark.slow
def test_two_ranks_leave_out_the_same(tmp_path):
    options = {"per_device_train_batch_size": 2}
    wanted, *found = run_ranks(all_ways, 2, str(tmp_path), options, listed(tmp_path / "out.json", OUT))[0]
    for each in found:
        assert_same(each, wanted)


@pytest.mark.parametrize(
    "out", [pytest.param((), id="none"), pytest.param((0, 7), id="fewer", marks=pytest.mark.slow), (0, 7, 8, 21, 45)]
)
def test_another_list_is_refused_within_an_epoch_and_taken_between_two(out, tmp_path):
    leave_out = listed(tmp_path / "out.json", OUT)
    train(str(tmp_path / "run"), rows(), leave_out | {"num_train_epochs": 1})
    changed = listed(tmp_path / "other.json", out)
    within, between = (str(tmp_path / "run" / f"checkpoint-{step}") for step in (8, 11))
    with pytest.raises(ValueError, match=r"samples left out: 5 of 47 \(\w{8}\) -> \d of 47.*Resuming would repeat"):
        build(str(tmp_path / "run"), rows(), changed).train(resume_from_checkpoint=within)
    if not out:
        with pytest.raises(ValueError, match=r"samples left out: 5 of 47 \(\w{8}\) -> none"):
            build(str(tmp_path / "run"), rows(), {}).train(resume_from_checkpoint=within)
    trainer = build(str(tmp_path / "run"), rows(), changed)
    trainer.train(resume_from_checkpoint=between)
    assert trainer.state.global_step == 11 + -(-(47 - len(out)) // 4)


def test_a_list_is_refused_by_a_checkpoint_of_a_run_without_one(tmp_path):
    train(str(tmp_path / "run"), rows(), {"num_train_epochs": 1})
    leave_out = listed(tmp_path / "out.json", OUT)
    with pytest.raises(ValueError, match="samples left out: none -> 5 of 47"):
        build(str(tmp_path / "run"), rows(), leave_out).train(
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-8")
        )


def test_a_list_that_was_moved_is_the_same(tmp_path):
    wanted = train(str(tmp_path / "whole"), rows(), listed(tmp_path / "out.json", OUT))
    run = str(tmp_path / "run")
    with pytest.raises(InterruptedError):
        train(run, rows(), listed(tmp_path / "out.json", OUT), ends=Ends())
    assert_same(train(run, rows(), listed(tmp_path / "moved.json", OUT[::-1])), wanted)


class Stream(IterableDataset):
    def __iter__(self):
        yield from rows()


class OwnLoader(Trainer):
    """Trains on data that it knows by itself."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(rows(), batch_size=4)


class FixedWeights(Trainer):
    """Has a weight for each sample of the whole data."""

    def _get_train_sampler(self, train_dataset=None):
        return WeightedRandomSampler([1.0] * 47, 10)


REFUSED = {
    "index": ([47], {}, "names 47, and the data set has 47 samples, from 0"),
    "negative": ([-1], {}, "names -1"),
    "length": ([3], {"number_of_samples": 48}, "is the list of 48 samples, and this data set has 47"),
    "all": (range(47), {}, "leaves out all 47 samples"),
    "content": ([3], {"samples": [{"index": 3, "digest": "0" * 16}]}, "sample 3 is not the one that was listed"),
    "form": ([3], {"samples": [3]}, "is no list of samples"),
    "number": ([3], {"number_of_samples": "many"}, "is no list of samples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_list_of_other_data_or_of_no_use_is_refused(case, tmp_path):
    indices, held, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        build(str(tmp_path), rows(), listed(tmp_path / "out.json", indices, **held))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        build(str(tmp_path), rows(), {"leave_out_samples": str(tmp_path / "absent.json")})


def test_data_without_indices_and_without_the_lists_samples_is_refused(tmp_path):
    leave_out = listed(tmp_path / "out.json", OUT)
    with pytest.raises(ValueError, match="Stream is iterable data"):
        build(str(tmp_path), Stream(), leave_out | {"max_steps": 3})
    with pytest.raises(ValueError, match="get_train_dataloader has other"):
        build(str(tmp_path), rows(), leave_out, OwnLoader).train()
    with pytest.raises(ValueError, match="train_dataset, which is None"):
        build(str(tmp_path), None, leave_out, OwnLoader).train()
    with pytest.raises(ValueError, match="47 weights, and with leave_out_samples there are 42"):
        build(str(tmp_path), rows(), leave_out, FixedWeights).train()


def other_lists(folder, data):
    """Give each rank another list."""
    rank = int(os.environ["RANK"])
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({"samples": [{"index": rank}]}, file)
    trainer = build(folder, data, {"leave_out_samples": f"{folder}/{rank}.json"})
    with pytest.raises(ValueError, match="other samples on some ranks"):
        trainer.train()
    trainer.strategy.close()


def test_lists_that_differ_between_ranks_are_refused(tmp_path):
    run_ranks(other_lists, 2, str(tmp_path), rows())
