"""A data set with `set_epoch` follows the epoch, in this process and in those that load data."""

import pytest
import torch
from small_data_sets import Following, keep
from torch.utils.data import ConcatDataset, StackDataset, Subset

from tr_core import TrainerCallback
from tr_core.data.fetch import epoch_listeners


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
def test_an_attribute_that_a_callback_sets_on_the_data_set_acts(make_trainer, workers):
    data, rescaling = Following(), Rescaling()
    trainer = make_trainer(
        train_dataset=data,
        callbacks=[rescaling],
        num_train_epochs=2,
        train_sampling_strategy="sequential",
        dataloader_num_workers=workers,
    )
    trainer.train()
    assert data.scale == 2.0
    assert torch.equal(torch.stack(rescaling.sums[5:]), 2 * torch.stack(rescaling.sums[:5]))


@pytest.mark.parametrize("method", ["get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_loader_shows_the_data_set_and_collator_that_were_given(make_trainer, method, stream):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Following().rows)

    data = Stream() if stream else Following()
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
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(9))

        def __len__(self):
            return 9

    options = {"train_dataset": Stream(), "data_collator": list, "remove_unused_columns": False}
    assert len(make_trainer(**options).get_train_dataloader()) == 3
    assert len(make_trainer(dataloader_drop_last=True, **options).get_train_dataloader()) == 2
