"""Data sets follow the epoch in every process, and errors of data name the samples."""

import contextlib
import traceback

import pytest
import torch
from support.data import (
    Failing,
    FailingCollator,
    FailingStream,
    FailingTogether,
    Following,
    Shared,
    Stream,
    keep,
    samples,
)
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from tr_core import TrainerCallback
from tr_core.collators.padding import default_data_collator
from tr_core.data import fetch
from tr_core.data.fetch import KeepColumns, MapFetch, StreamFetch, epoch_listeners, identity
from tr_core.data.sampler import Batch, EpochSampler, SampledBatches, take_slice


class Seen(TrainerCallback):
    """Notes the epoch that each micro-batch was made in, which its labels hold."""

    def __init__(self, looks=False):
        self.epochs, self.trainer, self.looks = [], None, looks

    def on_micro_batch_end(self, args, state, control, inputs=None, **kwargs):
        self.epochs.append(inputs["labels"].unique().tolist())
        if self.looks:  # looking at the data changes nothing
            next(iter(self.trainer.get_train_dataloader()))


def seen_in_training(make_trainer, dataset, *, looks=False, resume=None, **options):
    seen = Seen(looks)
    trainer = make_trainer(train_dataset=dataset, data_collator=keep, callbacks=[seen], num_train_epochs=3, **options)
    seen.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return seen.epochs


EXPECTED = [[epoch] for epoch in range(3) for _ in range(5)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dataloader_num_workers": 2},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {
            "dataloader_num_workers": 1,
            "dataloader_persistent_workers": True,
            "dataloader_multiprocessing_context": "spawn",
        },
    ],
    ids=["this process", "workers", "workers that live on", "spawned workers that live on"],
)
def test_every_sample_is_of_its_own_epoch(make_trainer, options):
    assert seen_in_training(make_trainer, Following(), remove_unused_columns=False, **options) == EXPECTED


def test_the_epoch_is_given_once_an_epoch_and_looking_at_the_data_gives_none(make_trainer):
    data = Following()
    assert seen_in_training(make_trainer, data, looks=True, remove_unused_columns=False) == EXPECTED
    assert data.calls == [0, 1, 2]


def test_evaluating_on_the_training_data_leaves_its_epoch(make_trainer):
    data = Following()
    options = {"eval_dataset": data, "eval_strategy": "steps", "eval_steps": 2, "remove_unused_columns": False}
    assert seen_in_training(make_trainer, data, **options) == EXPECTED
    assert data.calls == [0, 1, 2]


@pytest.mark.parametrize("wrap", [lambda d: Subset(d, range(20)), lambda d: ConcatDataset([Subset(d, range(20))])])
def test_a_data_set_inside_a_wrapper_of_torch_follows_too(make_trainer, wrap):
    assert seen_in_training(make_trainer, wrap(Following()), remove_unused_columns=False) == EXPECTED


def test_each_listener_inside_wrappers_is_found_once():
    one, other = Following(), Following()
    assert epoch_listeners(StackDataset(a=Subset(one, [0]), b=ConcatDataset([Subset(other, [0])]))) == [one, other]
    assert epoch_listeners(StackDataset(one, one)) == [one]
    assert epoch_listeners([1, 2]) == []


# The objects that a user gets are the user's own


class Rescaling(TrainerCallback):
    """Changes the data set that the loader shows, at the end of the first epoch."""

    def __init__(self):
        self.sums = []

    def on_epoch_end(self, args, state, control, train_dataloader=None, **kwargs):
        train_dataloader.dataset.scale = 2.0

    def on_micro_batch_end(self, args, state, control, inputs=None, **kwargs):
        self.sums.append(inputs["x"].abs().sum())


@pytest.mark.parametrize("workers", [0, 1])
def test_an_attribute_that_a_callback_sets_on_the_data_set_acts(make_trained, workers):
    data, rescaling = Following(), Rescaling()
    make_trained(
        train_dataset=data,
        callbacks=[rescaling],
        num_train_epochs=2,
        train_sampling_strategy="sequential",
        dataloader_num_workers=workers,
    )
    assert data.scale == 2.0
    assert torch.equal(torch.stack(rescaling.sums[5:]), 2 * torch.stack(rescaling.sums[:5]))


@pytest.mark.parametrize("method", ["get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_loader_shows_the_data_set_and_collator_that_were_given(make_trainer, method, stream):
    data = Stream(Following().rows) if stream else Following()
    trainer = make_trainer(
        train_dataset=data, eval_dataset=data, data_collator=keep, remove_unused_columns=False, max_steps=1
    )
    loader = getattr(trainer, method)(*([data] if "test" in method else []))
    assert loader.dataset is data
    assert loader.collate_fn is keep


def test_a_collator_that_is_set_on_the_loader_acts_from_the_next_iteration(make_trainer):
    loader = make_trainer(data_collator=keep, train_dataset=Following()).get_train_dataloader()
    loader.collate_fn = len
    assert list(loader) == [4] * 5
    loader.collate_fn = type
    assert list(loader) == [list] * 5


def test_a_loader_of_a_stream_with_a_length_has_one(make_trainer):
    class WithLength(Stream):
        def __len__(self):
            return len(self.rows)

    options = {"train_dataset": WithLength(range(9)), "data_collator": list, "remove_unused_columns": False}
    assert len(make_trainer(**options).get_train_dataloader()) == 3
    assert len(make_trainer(dataloader_drop_last=True, **options).get_train_dataloader()) == 2


# Errors of the data name the samples


WORKERS = pytest.mark.parametrize("workers", [0, 1])


def raised_in_training(make_trainer, dataset, **options):
    trainer = make_trainer(train_dataset=dataset, train_sampling_strategy="sequential", **options)
    with pytest.raises(Exception) as caught:
        trainer.train()
    return caught.value


def text(error):
    return "".join(traceback.format_exception(error))


@WORKERS
@pytest.mark.parametrize(("kind", "where"), [(Failing, "sample 11"), (FailingTogether, r"samples [8, 9, 10, 11]")])
@pytest.mark.parametrize("error", [StopIteration(), GeneratorExit()])
def test_an_error_that_ends_loops_is_another_one_that_names_the_sample(make_trainer, kind, where, error, workers):
    if workers and isinstance(error, GeneratorExit):
        error = StopIteration("with a value")
    caught = raised_in_training(make_trainer, kind(error), dataloader_num_workers=workers)
    assert type(caught) is RuntimeError
    assert f"the data set {kind.__name__} raised {type(error).__name__} for {where}, which ends a loop" in text(caught)
    assert f"{type(error).__name__}" in text(caught)


@WORKERS
def test_any_other_error_keeps_its_type_and_traceback_and_names_the_sample(make_trainer, workers):
    caught = raised_in_training(make_trainer, Failing(KeyError("text")), dataloader_num_workers=workers)
    assert type(caught) is KeyError
    assert "raised by the data set Failing for sample 11" in text(caught)
    assert "raise self.error" in text(caught)


@WORKERS
@pytest.mark.parametrize(("error", "kind"), [(StopIteration(), RuntimeError), (ValueError("odd"), ValueError)])
def test_an_error_of_the_collator_names_the_samples_of_its_batch(make_trainer, error, kind, workers):
    data = samples(20)
    collate = FailingCollator(error, data[11]["x"])
    caught = raised_in_training(make_trainer, data, data_collator=collate, dataloader_num_workers=workers)
    assert type(caught) is kind
    assert "the data collator FailingCollator" in text(caught)
    assert "for samples [8, 9, 10, 11]" in text(caught)


@WORKERS
@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_evaluation_and_prediction_name_the_sample_too(make_trainer, name, workers):
    trainer = make_trainer(dataloader_num_workers=workers)
    with pytest.raises(RuntimeError, match="raised StopIteration for sample 11"):
        getattr(trainer, name)(Failing(StopIteration()))


@WORKERS
def test_an_error_of_a_stream_names_the_position(make_trainer, workers):
    stream = FailingStream(OSError("gone"))
    caught = raised_in_training(make_trainer, stream, dataloader_num_workers=workers, max_steps=9)
    assert type(caught) is OSError
    own = " of worker 0's own part" if workers else ""
    assert f"raised by the data set FailingStream for sample 11 of the stream{own}" in text(caught)


@WORKERS
def test_an_error_of_the_collator_of_a_stream_names_the_positions(make_trainer, workers):
    data = samples(20)
    collate = FailingCollator(StopIteration(), data[11]["x"])
    caught = raised_in_training(
        make_trainer,
        FailingStream(OSError(), bad=99),
        data_collator=collate,
        dataloader_num_workers=workers,
        max_steps=9,
        remove_unused_columns=False,
    )
    assert type(caught) is RuntimeError
    assert "FailingCollator raised StopIteration for samples 8 to 11 of the stream" in text(caught)


def test_an_error_while_the_skipped_samples_of_a_stream_are_read_names_the_position():
    fetch = StreamFetch(FailingStream(OSError("gone"), bad=2), list, 4, seed=0)
    fetch.seek(0, 3)
    with pytest.raises(OSError, match="gone") as caught:
        list(fetch)
    assert caught.value.__notes__ == ["raised by the data set FailingStream for sample 2 of the stream"]


# Positions, streams and random numbers


def test_resuming_at_sample_ten_million_touches_no_earlier_sample():
    class Counted:
        touched = 0

        def __len__(self):
            return 10_000_004

        def __getitem__(self, index):
            self.touched += 1
            return index

    dataset = Counted()
    sampler = EpochSampler(len(dataset), 4, shuffle=False, seed=0)
    loader = DataLoader(MapFetch(dataset, list), batch_sampler=sampler, collate_fn=identity)
    batches = list(SampledBatches(loader, sampler).iterate(0, 10_000_000))
    assert [batch.inputs for batch in batches] == [[10_000_000, 10_000_001, 10_000_002, 10_000_003]]
    assert dataset.touched == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_while_loading_depends_on_the_position_alone(workers):
    def noisy(samples):
        return torch.tensor([float(sample) for sample in samples]) + torch.rand(len(samples))

    def load(position):
        sampler = EpochSampler(20, 2, shuffle=True, seed=1)
        sampler.seek(3, position)
        loader = DataLoader(
            MapFetch(list(range(20)), noisy), batch_sampler=sampler, collate_fn=identity, num_workers=workers
        )
        return list(loader)

    whole, rest = load(0), load(8)
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert not torch.equal(whole[0], whole[0].round())


def test_loading_in_this_process_leaves_its_generators_alone():
    fetch = MapFetch([1.0] * 8, lambda samples: torch.rand(len(samples)))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    batch = Batch([0, 1])
    fetch.__getitems__(batch)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_a_stream_without_loss_or_repetition(world_size):
    used = []
    for rank in range(world_size):
        stream = StreamFetch(list(range(17)), list, 2, seed=0, rank=rank, world_size=world_size)
        for round_number, (inputs, total, _) in enumerate(stream):
            share = take_slice(0, 0, total, 2, rank, world_size)
            used += inputs if share.weight else []
            assert total == min(2 * world_size, 17 - round_number * 2 * world_size)
    assert sorted(used) == list(range(17))


def test_a_stream_is_skipped_by_reading_without_collating():
    collated = []
    stream = StreamFetch(list(range(12)), lambda samples: collated.append(samples) or samples, 2, seed=0)
    assert stream.seek(0, 6) == 3
    assert [inputs for inputs, *_ in stream] == [None, None, None, [6, 7], [8, 9], [10, 11]]
    assert collated == [[6, 7], [8, 9], [10, 11]]


def test_a_stream_that_cannot_be_split_where_it_stopped_says_what_to_do():
    stream = StreamFetch(list(range(12)), list, 4, seed=0)
    stream.seek(0, 6)
    loader = DataLoader(stream, batch_size=None, num_workers=2, collate_fn=identity)
    with pytest.raises(ValueError, match=r"2 samples into a micro-batch of 4 with 2 workers; .*num_workers=0"):
        list(loader)


def test_a_stream_keeps_its_position_where_it_is_iterated_in_this_process():
    dataset = Shared()
    stream = StreamFetch(dataset, list, 2, seed=0)
    stream.seek(3, 4)
    assert dataset.epoch == 3
    assert [inputs for inputs, *_ in stream][:3] == [None, None, [304, 305]]


def swaps(monkeypatch):
    """Return the list that gets the seed of every batch for which the generators are set aside."""
    seeds, swap = [], fetch.swap_rng
    monkeypatch.setattr(fetch, "swap_rng", lambda seed: (seeds.append(seed), swap(seed))[1])
    return seeds


class Counted(dict):
    """A sample with code of its own."""


def test_generators_are_set_aside_only_where_loading_could_draw_from_them(monkeypatch):
    seeds = swaps(monkeypatch)
    plain = [{"x": torch.ones(2), "labels": number} for number in range(4)]
    batch = Batch([0, 3])
    first = MapFetch(plain, default_data_collator).__getitems__(batch)
    assert seeds == []
    others = [*plain[:3], Counted(plain[3])], [*plain[:3], {**plain[3], "x": Shared()}], tuple(plain)
    for data in others:
        with contextlib.suppress(Exception):  # what the collator says of a value that cannot be stacked
            MapFetch(data, default_data_collator).__getitems__(batch)
    MapFetch(plain, lambda samples: default_data_collator(samples)).__getitems__(batch)
    assert len(seeds) == len(others) + 1
    narrowed = KeepColumns(default_data_collator, ["x", "labels"], "Model")
    again = MapFetch(plain, narrowed).__getitems__(batch)
    assert len(seeds) == len(others) + 1
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_missing_sample_of_a_plain_list_is_named(monkeypatch):
    with pytest.raises(IndexError) as caught:
        MapFetch([{"x": 1}], default_data_collator).__getitems__(Batch([0, 5]))
    assert "raised by the data set list for sample 5" in caught.value.__notes__


def test_batches_appear_in_a_profile_though_no_block_surrounds_them_without_one(monkeypatch):
    blocks, original = [], _SingleProcessDataLoaderIter.__next__
    monkeypatch.setattr(_SingleProcessDataLoaderIter, "__next__", lambda self: (blocks.append(1), original(self))[1])
    loader = DataLoader([{"x": torch.ones(1)}] * 4, batch_sampler=EpochSampler(4, 2, shuffle=False, seed=0))
    batches = SampledBatches(loader, loader.batch_sampler)
    assert len(list(batches.iterate(0, 0))) == 2
    assert blocks == []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(batches.iterate(0, 0))) == 2
    assert any("DataLoader" in event.key for event in profile.key_averages())
