"""Samples of similar length share a batch, in an order that seed, epoch and lengths alone decide."""

import pytest
import torch
from support.models import Base
from support.ranks import Alike
from torch import nn

from tr_core import TrainerCallback
from tr_core.data.batches import batches_of
from tr_core.data.length_grouping import LengthGrouping, measure_lengths
from tr_core.data.sampler import EpochSampler, permutation


def some_lengths(number, seed=0):
    return torch.randint(1, 60, (number,), generator=torch.Generator().manual_seed(seed))


def grouped(number, batch_size, per_step=None, seed=3, **options):
    lengths = some_lengths(number)
    grouping = LengthGrouping(lengths, per_step or batch_size * options.get("world_size", 1))
    return EpochSampler(number, batch_size, shuffle=True, seed=seed, grouping=grouping, **options)


# The order


def test_epochs_and_seeds_differ_and_nothing_is_drawn_from_the_global_generator():
    state = torch.get_rng_state()
    sampler = grouped(100, 4)
    orders = []
    for epoch in (0, 1, 0):
        sampler.seek(epoch)
        orders.append(sampler.order().tolist())
    assert orders[0] == orders[2] != orders[1]
    assert grouped(100, 4, seed=4).order().tolist() != orders[0]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("number", [0, 1])
def test_next_to_no_data_can_be_grouped(number):
    assert LengthGrouping(some_lengths(number), 8).arrange(permutation(number, 0, 0)).tolist() == list(range(number))


# Lengths


class Column(list):
    """Data that knows its columns, as that of datasets does, and counts what is read of it."""

    column_names = ("length", "input_ids")

    def __init__(self, rows):
        super().__init__(rows)
        self.read = []

    def __getitem__(self, key):
        self.read.append(key)
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


ROWS = [{"input_ids": [1] * n, "length": 10 * n, "n": n} for n in (3, 1, 2)]


def test_lengths_come_from_a_column_without_reading_a_sample():
    dataset = Column(ROWS)
    assert measure_lengths(dataset, "length", "input_ids").tolist() == [30, 10, 20]
    assert dataset.read == ["length"]


def test_lengths_come_from_the_samples_where_these_have_the_column():
    assert measure_lengths(ROWS, "length", "input_ids").tolist() == [30, 10, 20]
    assert measure_lengths(ROWS, "n", "input_ids").tolist() == [3, 1, 2]


@pytest.mark.parametrize("convert", [list, torch.tensor, lambda ids: torch.tensor(ids).numpy()])
def test_lengths_are_measured_where_there_is_no_column(convert):
    rows = [{"input_ids": convert(row["input_ids"])} for row in ROWS]
    assert measure_lengths(rows, "length", "input_ids").tolist() == [3, 1, 2]


def test_samples_are_read_many_at_a_time_where_they_can_be():
    class Many(list):
        calls = 0

        def __getitems__(self, indices):
            self.calls += 1
            return [self[index] for index in indices]

    dataset = Many({"x": [0] * (i % 7)} for i in range(2500))
    assert measure_lengths(dataset, "length", "x").tolist() == [i % 7 for i in range(2500)]
    assert dataset.calls == 3


def test_measuring_leaves_random_numbers_as_they_were():
    class Noisy:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"x": torch.rand(index + 1)}

    state = torch.get_rng_state()
    assert measure_lengths(Noisy(), "length", "x").tolist() == [1, 2, 3]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}], r"have the columns \['text'\]: neither 'length', which length_column_name names, nor 'ids'"),
        ([torch.ones(2)], "are of type Tensor: neither 'length'"),
        ([{"ids": [1]}, {"ids": 5}], "takes lengths from 'ids', but sample 1 has 5 there; .* something with a length"),
        ([{"length": 2}, {"length": None}], "sample 1 has None there; it must be a whole number"),
    ],
)
def test_data_without_lengths_is_refused_with_what_it_has(rows, message):
    with pytest.raises(ValueError, match=message):
        measure_lengths(rows, "length", "ids")


# Training


class Sequences(Base):
    """Classifies sequences by their mean."""

    main_input_name = "x"

    def forward(self, x, mask, labels):
        logits = self.layers((x * mask).sum(1) / mask.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def pad(samples):
    rows = [sample["x"] for sample in samples]
    pad_sequence = nn.utils.rnn.pad_sequence
    mask = pad_sequence([torch.ones(len(row), 1) for row in rows], batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"x": pad_sequence(rows, batch_first=True), "mask": mask, "labels": labels}


def sequences(number):
    lengths = some_lengths(number).tolist()
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(n, 8, generator=generator), "labels": i % 3} for i, n in enumerate(lengths)]


class Widths(TrainerCallback):
    """Notes the shape of every batch of a Trainer's model."""

    def __init__(self):
        self.shapes = []

    def on_train_begin(self, args, state, control, model, **kwargs):
        model.register_forward_pre_hook(
            lambda module, given, named: self.shapes.append(tuple(named["x"].shape[:2])), with_kwargs=True
        )


def train(make_trainer, dataset, **changes):
    torch.manual_seed(0)
    widths = Widths()
    trainer = make_trainer(
        model=Sequences(), train_dataset=dataset, data_collator=pad, callbacks=[widths], num_train_epochs=2, **changes
    )
    trainer.train()
    return trainer, widths.shapes


@pytest.mark.parametrize("option", [{"train_sampling_strategy": "group_by_length"}, {"group_by_length": True}])
def test_training_puts_the_longest_batch_first_and_pads_less(make_trainer, option):
    dataset = sequences(80)
    _, shapes = train(make_trainer, dataset, **option)
    _, random = train(make_trainer, dataset)
    assert shapes[0][1] == max(len(sample["x"]) for sample in dataset)
    assert sum(width for _, width in shapes) < 0.8 * sum(width for _, width in random)


def test_a_group_is_of_the_samples_of_a_step(make_trainer):
    trainer, _ = train(
        make_trainer, sequences(40), train_sampling_strategy="group_by_length", gradient_accumulation_steps=3
    )
    loader = trainer.get_train_dataloader()
    assert loader.batch_sampler.grouping.samples_per_step == 12


def test_evaluation_keeps_the_order_of_the_data(make_trainer):
    dataset = sequences(9)
    trainer, _ = train(make_trainer, dataset, train_sampling_strategy="group_by_length")
    assert trainer.predict(dataset).label_ids.tolist() == [sample["labels"] for sample in dataset]


# Resuming


def passes_of(trainer):
    return batches_of(trainer.get_train_dataloader(), trainer.args.train_batch_size, Alike())


def test_a_resumed_run_keeps_the_groups_it_began_with(make_trainer):
    begun, resumed = (
        passes_of(
            make_trainer(
                model=Sequences(),
                train_dataset=sequences(60),
                data_collator=list,
                train_sampling_strategy="group_by_length",
                per_device_train_batch_size=size,
            )
        )
        for size in (4, 6)
    )
    resumed.restore_order(begun.order_state(), 12)
    rest = [tuple(sample["x"].shape) for batch in resumed.iterate(1, 12) for sample in batch.inputs]
    whole = [tuple(sample["x"].shape) for batch in begun.iterate(1, 0) for sample in batch.inputs]
    assert rest == whole[12:]
    assert resumed.order_state() == begun.order_state() == {"strategy": "group_by_length", "samples_per_step": 4}


@pytest.mark.parametrize("orders", [("random", "sequential"), ("random_computed", "random")])
def test_continuing_an_epoch_in_another_order_is_refused(make_trainer, orders):
    begun, other = (passes_of(make_trainer(24, train_sampling_strategy=strategy)) for strategy in orders)
    message = f"8 samples into an epoch with train_sampling_strategy='{orders[0]}'; going on with '{orders[1]}' would"
    with pytest.raises(ValueError, match=message):
        other.restore_order(begun.order_state(), 8)
    other.restore_order(begun.order_state(), 0)
    other.restore_order(begun.order_state(), 24)


def test_measuring_shows_how_far_it_is_on_the_first_rank_alone(make_trainer, monkeypatch):
    shown = []

    def progress(rows, *, total, description, disable):
        shown.append((total, description, not disable))
        return rows

    monkeypatch.setattr("tr_core.data.length_grouping.progress", progress)
    rows = [{"input_ids": [1] * (i % 5 + 1)} for i in range(20)]
    for quiet in (False, True):
        trainer = make_trainer(train_dataset=rows, train_sampling_strategy="group_by_length", disable_tqdm=quiet)
        trainer.get_train_dataloader()
        trainer.strategy.rank = 1
        trainer.get_train_dataloader()
    assert shown == [(20, "measuring lengths", is_shown) for is_shown in (True, False, False, False)]
