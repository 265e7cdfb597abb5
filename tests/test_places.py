"""Data and loaders of other libraries that can tell their place: resumed runs go on there, to the last bit."""

import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tr_core import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from resume_runs import ROWS, Setting, are_same, build, collate_at_random, fingerprint, row

READ = []


def note(sample):
    READ.append(sample["labels"] + 3 * sample["place"])
    return {"input_ids": torch.tensor(sample["input_ids"]), "labels": sample["labels"]}


def lines(buffer=0):
    rows = [{**row(index), "input_ids": row(index)["input_ids"].tolist(), "place": index // 3} for index in range(ROWS)]
    data = Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
    return (data.shuffle(seed=1, buffer_size=buffer) if buffer else data).map(note)


def of_datasets(folder, buffer, **changes):
    trainer = build(Setting(order="stream"), folder, **changes)
    trainer.train_dataset = lines(buffer)
    return trainer


@pytest.mark.parametrize("buffer", [0, 10])
def test_a_stream_of_the_datasets_library_goes_on_bit_equal(buffer, tmp_path):
    alone = of_datasets(tmp_path, buffer)
    alone.train()
    for step in (1, 10, 11, 12, 25):  # of eleven a pass
        READ.clear()
        resumed = of_datasets(tmp_path, buffer, save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert are_same(fingerprint(alone), fingerprint(resumed)), step
        if not buffer and step < 11:  # nothing before the place is read again
            assert READ[0] == step * 4


class WithOwnLoader(Trainer):
    workers = 0

    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(5)
        data = [row(index) for index in range(ROWS)]
        return StatefulDataLoader(
            data,
            batch_size=4,
            shuffle=True,
            generator=generator,
            num_workers=self.workers,
            collate_fn=plain_collate,
        )


def plain_collate(samples):
    """Random numbers drawn by a loader of one's own are its affair: none here."""
    batch = collate_at_random(samples)
    return {**batch, "noise": torch.zeros_like(batch["noise"])}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls what torch is about to drop
@pytest.mark.parametrize(("workers", "steps"), [(0, (1, 11, 15)), (2, (6, 30))])
def test_a_loader_with_a_state_goes_on_bit_equal(workers, steps, tmp_path, monkeypatch):
    monkeypatch.setattr(WithOwnLoader, "workers", workers)

    def make(**changes):
        plain = build(Setting(), tmp_path, **changes)
        return WithOwnLoader(plain.model, plain.args)

    alone = make()
    alone.train()
    for step in steps:
        resumed = make(save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert are_same(fingerprint(alone), fingerprint(resumed)), step
