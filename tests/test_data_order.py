"""Order of the data through checkpoints and in several processes: nothing is repeated, nothing left out."""

import contextlib
import itertools

import pytest
import torch
from shared.callbacks import Stop
from shared.results import history
from torch import nn

from tr_core import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import run_ranks

WORDS, PAD, MASK = 50, 0, 1


class Tokenizer:
    """Pads token ids, and knows what a masked language model needs to know."""

    pad_token_id, mask_token_id, padding_side = PAD, MASK, "right"

    def __len__(self):
        return WORDS

    def get_special_tokens_mask(self, ids, already_has_special_tokens):
        return [int(number in (PAD, MASK)) for number in ids]

    def pad(self, features, return_tensors, **options):
        rows = [torch.as_tensor(feature["input_ids"]) for feature in features]
        return {"input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)}


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dropout, self.head = nn.Embedding(WORDS, 8), nn.Dropout(0.2), nn.Linear(8, WORDS)

    def forward(self, input_ids, labels):
        logits = self.head(self.dropout(self.embedding(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)}


class Texts:
    """Texts of different lengths that note which of them was asked for once training has begun."""

    def __init__(self, number):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(8, 40, (number,), generator=generator).tolist()
        self.rows = [torch.randint(2, WORDS, (length,), generator=generator).tolist() for length in lengths]
        self.lengths, self.seen, self.notes = lengths, [], False

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.notes:
            self.seen.append(index)
        return {"input_ids": self.rows[index], "text": "never asked for"}


class NoteAndStop(TrainerCallback):
    """Has the data note what is read, and ends the process, so to say, at a step."""

    def __init__(self, texts, step):
        self.texts, self.step = texts, step

    def on_train_begin(self, args, state, control, **kwargs):
        self.texts.notes = True

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stop


def train(folder, number, options, stop_at=None, resume=None):
    """Train a masked language model; return weights, samples used, and the log without times."""
    torch.set_num_threads(1)
    texts = Texts(number)
    shared = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    trainer = Trainer(
        LanguageModel(),
        TrainingArguments(str(folder), **{**shared, **options}),
        data_collator=DataCollatorForLanguageModeling(Tokenizer(), mlm_probability=0.5),
        train_dataset=texts,
        callbacks=[NoteAndStop(texts, stop_at)],
    )
    with contextlib.suppress(Stop):
        trainer.train(resume_from_checkpoint=resume)
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.strategy.close()
    return weights, texts.seen, history(trainer)


GROUPED = {"train_sampling_strategy": "group_by_length"}
SAVING = {"save_strategy": "steps", "save_steps": 1}


def assert_same(one, other):
    assert one[2] == other[2]
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_run_goes_on_with_the_next_sample_whatever_its_batch_size(tmp_path, strategy):
    options = {"train_sampling_strategy": strategy, "num_train_epochs": 2}
    whole = train(tmp_path / "whole", 60, options)[1]
    train(tmp_path / "run", 60, {**options, **SAVING}, stop_at=4)
    for batch_size, accumulation in ((2, 1), (6, 1), (4, 2)):
        changed = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        assert train(tmp_path / "run", 60, {**options, **changed}, resume=True)[1] == whole[16:]


def train_in_every_order(folder, number, options):
    """In ranks: return the samples used, by order of the data and by whether an incomplete batch is left out."""
    ways = itertools.product(("random", "group_by_length", "sequential", "random_computed"), (False, True))
    names = ("train_sampling_strategy", "dataloader_drop_last")
    return {way: train(folder, number, {**options, **dict(zip(names, way, strict=True))})[1] for way in ways}


def test_two_processes_use_every_sample_once_a_pass(tmp_path):
    number, passes = 43, 3
    ranks = run_ranks(train_in_every_order, 2, str(tmp_path), number, {"num_train_epochs": passes}, timeout_s=120)
    for way in ranks[0]:
        _, drop_last = way
        # A pass of a rank is five micro-batches of four, and its share of the three samples that are left.
        of_a_pass = (20, 20) if drop_last else (21, 22)
        for start in range(passes):
            used = []
            for rank, each in zip(ranks, of_a_pass, strict=True):
                used += rank[way][start * each : (start + 1) * each]
            assert len(used) == len(set(used)) == (40 if drop_last else number), way
            assert set(used) <= set(range(number)), way
        assert tuple(len(rank[way]) for rank in ranks) == tuple(passes * each for each in of_a_pass), way


def test_two_processes_group_as_one_does_and_resume_in_one(tmp_path):
    alone = train(tmp_path / "alone", 48, {**GROUPED, "per_device_train_batch_size": 8, "num_train_epochs": 2})[1]
    options = {**GROUPED, **SAVING, "num_train_epochs": 2}
    ranks = run_ranks(train, 2, str(tmp_path / "two"), 48, options, 2, timeout_s=120)
    together = [index for step in range(2) for rank in ranks for index in rank[1][4 * step : 4 * step + 4]]
    assert together == alone[:16]
    rest = train(tmp_path / "two", 48, {**GROUPED, "num_train_epochs": 2}, resume=True)[1]
    assert rest == alone[16:]


COMPUTED = {"train_sampling_strategy": "random_computed", "num_train_epochs": 2}
MANY = 4500  # more are permuted by the network, fewer are drawn


def test_a_computed_order_goes_on_bit_equal_in_the_middle_of_a_pass(tmp_path):
    options = {**COMPUTED, "per_device_train_batch_size": 700}
    alone = train(tmp_path / "alone", MANY, options)
    for step in (3, 9):  # of seven a pass
        folder = tmp_path / str(step)
        train(folder, MANY, {**options, **SAVING}, stop_at=step)
        resumed = train(folder, MANY, options, resume=True)
        assert_same(resumed, alone)
        assert resumed[1] == alone[1][700 * step if step < 7 else MANY + 700 * (step - 7) :]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_computed_order_goes_on_in_another_number_of_processes(tmp_path, before, after):
    def run(processes, steps, **options):
        share = {**COMPUTED, "per_device_train_batch_size": 600 // processes, "max_steps": 4, **options}
        if processes == 1:
            return train(tmp_path, MANY, share, *steps)[1]
        ranks = run_ranks(train, processes, str(tmp_path), MANY, share, *steps, timeout_s=120)
        seen = [torch.tensor(rank[1]).view(-1, 600 // processes) for rank in ranks]
        return torch.cat(seen, dim=1).flatten().tolist()

    begun = run(before, (2,), **SAVING)
    rest = run(after, (None, True))
    assert begun + rest == train(tmp_path / "alone", MANY, {**COMPUTED, "per_device_train_batch_size": 600})[1][:2400]


def test_neighbours_of_a_grouped_run_are_of_similar_length_in_every_process(tmp_path):
    ranks = run_ranks(train, 2, str(tmp_path), 400, {**GROUPED, "num_train_epochs": 1}, timeout_s=120)
    lengths = Texts(400).lengths
    spread = [
        max(widths) - min(widths)
        for rank in ranks
        for widths in ([lengths[i] for i in rank[1][k : k + 4]] for k in range(0, 200, 4))
    ]
    assert sum(spread) / len(spread) < 3  # of lengths from 8 to 39; in a random order it would be 19
