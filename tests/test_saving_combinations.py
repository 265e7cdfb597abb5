"""A stream that has a place of its own, and is back at its beginning at its end, is not read twice."""

import random
import sys
from pathlib import Path

import pytest
from torch.utils.data import IterableDataset

sys.path.insert(0, str(Path(__file__).parent))  # in the processes of ranks too

from combination_runs import Combination, build, differences, fingerprint, rows


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


# Batches of three: the last of a pass is short, or as large as the others; steps of one or two batches.
@pytest.mark.parametrize(("number", "accumulation"), [(23, 1), (24, 1), (27, 2)])
def test_a_stream_that_is_back_at_its_beginning_at_its_end_is_not_read_twice(tmp_path, number, accumulation):
    options = {"gradient_accumulation_steps": accumulation}
    alone, _ = train_on_reshuffled(tmp_path, number, **options)
    per_step, steps_of_a_pass = 3 * accumulation, -(-number // (3 * accumulation))
    for step in (5, 8, 9):
        resume = {"save_strategy": "no", "resume_from_checkpoint": str(tmp_path / f"checkpoint-{step}")}
        resumed, read = train_on_reshuffled(tmp_path / str(step), number, **options, **resume)
        assert differences(alone, resumed, [name for name in alone if name != "checkpoints"]) == [], step
        left = [number - at % steps_of_a_pass * per_step for at in range(step, 20)]
        assert read == sum(min(per_step, samples) for samples in left), step
