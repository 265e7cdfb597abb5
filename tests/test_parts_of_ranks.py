"""Data that each rank has a part of: streams that are divided already, and loaders of the user's own of any length."""

import io
import logging

import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from shared.data import rows
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.nodes import Loader, MapStyleWrapper

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

COMMON = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "num_train_epochs": 1,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "save_strategy": "no",
    "disable_tqdm": True,
    "log_level": "error",
    "use_cpu": True,
    "ddp_timeout": 30,
    "strategy": "ddp",
    "label_names": ["number"],
    "remove_unused_columns": False,
}
LIMIT_S = 100


class Squares(nn.Module):
    """Has as its loss the mean square of a projection; it notes the samples that counted."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)

    def forward(self, x, number=None):
        logits = self.layer(x)
        return {"loss": logits.square().mean(), "logits": torch.cat([number[:, None].float(), logits], 1)}


def samples(number):
    return [{"x": row["x"], "number": torch.tensor(place)} for place, row in enumerate(rows(number))]


class Stream(IterableDataset):
    """Samples in order: all of them, or those of one rank."""

    def __init__(self, samples, noise=False):
        self.samples, self.noise = samples, noise

    def __iter__(self):
        for sample in self.samples:
            yield sample | ({"x": sample["x"] + torch.randn(8)} if self.noise else {})


def whole(number, rank):
    return Stream(samples(number))


def noisy(number, rank):
    return Stream(samples(number), noise=True)


def by_hand(number, rank):
    return Stream(samples(number)[rank::2])


def by_node(number, rank):
    given = Dataset.from_dict({"x": [row["x"].tolist() for row in rows(number)], "number": list(range(number))})
    return split_dataset_by_node(given.to_iterable_dataset(num_shards=1), rank, 2)


def shard_by_node(number, rank):
    given = Dataset.from_dict({"x": [row["x"].tolist() for row in rows(number)], "number": list(range(number))})
    return split_dataset_by_node(given, rank, 2)


def by_nodes(number, rank):
    data = samples(number)
    return Loader(MapStyleWrapper(data, DistributedSampler(data, 2, rank, shuffle=False)))


WHOLE = {"whole": whole, "noisy": noisy}
SHARDS = {"shard_by_node": shard_by_node}
DIVIDED = {"by_hand": by_hand, "by_node": by_node, "by_nodes": by_nodes}
STREAMS = WHOLE | DIVIDED | SHARDS


def streamed(folder, kind, number, act, options):
    """Return what a rank of two used of a stream, or the text of its refusal."""
    args = TrainingArguments(folder, **COMMON | options, max_steps=4)
    trainer, used = Trainer(Squares(), args), []

    def note(module, positional, named):
        used.extend(named["number"].tolist())

    said = logging.StreamHandler(io.StringIO())
    logging.getLogger("tr_core").addHandler(said)
    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    data = STREAMS[kind](number, trainer.strategy.rank)
    if act == "train":
        trainer.train_dataset = data
    try:
        trainer.train() if act == "train" else trainer.evaluate(data)
    except ValueError as error:
        return str(error)
    finally:
        logging.getLogger("tr_core").removeHandler(said)
    return said.stream.getvalue() or used


def each_of(name, folder, cases):
    """Return what the function of this name gives for each case, in one process of a rank."""
    results = [globals()[name](f"{folder}/{number}", *case) for number, case in enumerate(cases)]
    torch.distributed.destroy_process_group()
    return results


def run_cases(function, folder, cases):
    """Return what two ranks give for each case."""
    return list(zip(*run_ranks(each_of, 2, function.__name__, str(folder), cases, timeout_s=LIMIT_S), strict=True))


def test_a_stream_that_is_divided_already_is_refused_on_all_ranks(tmp_path):
    cases = [
        (kind, number, act, {}) for kind in DIVIDED for number, act in ((16, "train"), (17, "train"), (17, "eval"))
    ]
    cases.append(("by_hand", 17, "train", {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}))
    for said in run_cases(streamed, tmp_path, cases):
        assert all("the ranks read different samples" in each for each in said)
        assert "or return a loader of this rank's own part from get_train_dataloader" in said[0]


def test_samples_that_are_divided_already_are_refused_or_warned_of(tmp_path):
    told = {"log_level": "warning"}
    cases = [("shard_by_node", number, act, told) for number in (16, 17) for act in ("train", "eval")]
    for (_, number, *_), said in zip(cases, run_cases(streamed, tmp_path, cases), strict=True):
        expected = "has [9, 8] samples, by rank" if number == 17 else "was made in another way on each rank"
        assert expected in said[0]
        assert "without split_dataset_by_node" in said[0]


def test_a_whole_stream_is_divided_between_the_ranks(tmp_path):
    for used in run_cases(streamed, tmp_path, [(kind, 16, act, {}) for kind in WHOLE for act in ("train", "eval")]):
        assert sorted(used[0] + used[1]) == list(range(16))


class Parts(Trainer):
    """Has loaders of each rank's own part."""

    parts: list
    has_length = True

    def loader(self):
        part = self.parts[self.strategy.rank]
        return DataLoader(part if self.has_length else Stream(part), batch_size=2)

    def get_train_dataloader(self):
        return self.loader()

    def get_eval_dataloader(self, eval_dataset=None):
        return self.loader()


def parts_of(sizes):
    """Return lists of samples, one for each rank."""
    data, begin = samples(sum(sizes)), 0
    parts = []
    for size in sizes:
        parts.append(data[begin : begin + size])
        begin += size
    return parts


def train_parts(folder, sizes, has_length, options, resume=None):
    trainer = Parts(Squares(), TrainingArguments(folder, **COMMON | options))
    trainer.parts, trainer.has_length = parts_of(sizes), has_length
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step, trainer.model.layer.weight.tolist()


def evaluate_parts(folder, sizes, has_length):
    trainer = Parts(Squares(), TrainingArguments(folder, **COMMON))
    trainer.parts, trainer.has_length = parts_of(sizes), has_length
    output = trainer.evaluation_loop(trainer.loader(), "parts")
    return output.predictions[:, 0].tolist(), output.num_samples, output.metrics["eval_loss"]


def by_hand_on(sizes, accumulation):
    """Return the steps and the weights of a plain loop over the same parts: of batches that are there, the mean."""
    model, parts = Squares(), [list(DataLoader(part, batch_size=2)) if part else [] for part in parts_of(sizes)]
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), 0
    longest = max(map(len, parts))
    for begin in range(0, longest, accumulation):
        size = min(accumulation, longest - begin)
        for place in range(begin, begin + size):
            there = [part[place] for part in parts if place < len(part)]
            for batch in there:
                (model(**batch)["loss"] / len(there) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps, model.layer.weight


def test_parts_of_any_length_end_together(tmp_path):
    cases, expected = [], []
    for sizes, accumulation in (((9, 8), 1), ((12, 4), 1), ((4, 11), 3), ((0, 6), 2), ((8, 8), 1)):
        by_hand = by_hand_on(sizes, accumulation)
        for has_length in (True, False):
            ends = {} if has_length else {"max_steps": by_hand[0]}
            cases.append((sizes, has_length, {"gradient_accumulation_steps": accumulation, **ends}))
            expected.append(by_hand)
    for ends, (steps, weight) in zip(run_cases(train_parts, tmp_path, cases), expected, strict=True):
        assert [end[0] for end in ends] == [steps, steps]
        assert ends[0][1] == ends[1][1]
        # Some twenty roundings of sums of eight products, in two orders, and ten times that.
        assert torch.allclose(torch.tensor(ends[0][1]), weight, atol=5e-5, rtol=0)


def test_an_evaluation_counts_every_sample_of_parts_once(tmp_path):
    cases = [(sizes, has_length) for sizes in ((9, 8), (3, 10), (0, 5)) for has_length in (True, False)]
    for (sizes, _), ends in zip(cases, run_cases(evaluate_parts, tmp_path, cases), strict=True):
        count = sum(sizes)
        loss = Squares()(x=torch.stack([row["x"] for row in samples(count)]), number=torch.zeros(count))["loss"].item()
        for numbers, counted, of_evaluation in ends:
            assert sorted(numbers) == list(range(count))
            assert counted == count
            assert of_evaluation == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_a_resume_goes_on_where_one_part_had_ended(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 2}
    stopped = saving | {"max_steps": 4}
    sizes = (12, 4)
    alone = run_cases(train_parts, tmp_path / "alone", [(sizes, True, saving)])
    run_cases(train_parts, tmp_path / "cut", [(sizes, True, stopped)])
    assert run_cases(train_parts, tmp_path / "cut", [(sizes, True, saving, True)]) == alone
