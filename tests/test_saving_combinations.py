"""Train with many ways to save, to be interrupted and to go on at once: the end is that of the run left alone."""

import random
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

sys.path.insert(0, str(Path(__file__).parent))  # in the processes of ranks too

from combination_runs import Combination, build, differences, fingerprint, rows


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Reshuffled(IterableDataset):
    """Has another order in each pass, knows its place, and at the end of a pass is at the beginning of the next."""

    def __init__(self, samples):
        self.samples, self.place, self.epoch, self.read = samples, 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(self.epoch).sample(self.samples, len(self.samples))
        while self.place < len(order):
            self.place += 1
            self.read += 1
            yield order[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def train_on_reshuffled(folder, number, **options):
    given = Combination({"max_steps": 20, "save_steps": 1, "logging_steps": 1, **options}, dropout=0.2)
    trainer, last = build(given, folder)
    trainer.train_dataset = Reshuffled(rows(number))
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return fingerprint(trainer, last), trainer.train_dataset.read


# Batches of three: the last of a pass is short, or as large as the others.
@pytest.mark.parametrize("number", [23, 24])
@pytest.mark.parametrize("step", [7, 8, 9, 16])
def test_a_stream_that_forgets_its_place_at_its_end_goes_on_with_the_next_pass(tmp_path, number, step):
    alone, _ = train_on_reshuffled(tmp_path, number)
    source = str(tmp_path / f"checkpoint-{step}")
    resumed, read = train_on_reshuffled(tmp_path / "on", number, save_strategy="no", resume_from_checkpoint=source)
    assert differences(alone, resumed, [name for name in alone if name != "checkpoints"]) == []
    assert read == sum(min(3, number - start) for step_ in range(step, 20) for start in [step_ % 8 * 3])
