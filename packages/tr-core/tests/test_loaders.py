"""Loaders whose worker processes live on, seeds of the data, sets of evaluation data, and data that changed."""

import os
from types import SimpleNamespace

import pytest
import torch
from support.callbacks import on
from support.data import Shared, noisy, samples
from support.models import Classifier
from support.ranks import Alike
from torch.utils.data import DataLoader

from tr_core.data.batches import batches_of
from tr_core.data.loaders import LoaderCache, train_loader


def stream_passes(make_trainer, number=12, **options):
    trainer = make_trainer(
        train_dataset=Shared(number),
        data_collator=noisy,
        max_steps=2,
        per_device_train_batch_size=2,
        remove_unused_columns=False,
        **options,
    )
    return batches_of(trainer.get_train_dataloader(), 2, Alike())


@pytest.mark.parametrize(("context", "number"), [("fork", 2), ("spawn", 1)])
def test_persistent_workers_follow_epoch_and_position_of_a_stream(make_trainer, context, number):
    workers = {"dataloader_num_workers": number, "dataloader_multiprocessing_context": context}
    kept = stream_passes(make_trainer, dataloader_persistent_workers=True, **workers)
    alone = stream_passes(make_trainer)
    # Resumed within the first epoch; the epochs after it begin at their first sample.
    for epoch, position in ((0, 4), (1, 0), (2, 8)):
        expected = [batch.inputs for batch in alone.iterate(epoch, position)]
        assert [batch.inputs for batch in kept.iterate(epoch, position)] == expected
        assert [row for batch in expected for row, _ in batch] == [100 * epoch + i for i in range(position, 12)]


def worker_of(rows):
    return {"x": torch.stack([row["x"] for row in rows]), "labels": torch.tensor([os.getpid()] * len(rows))}


def test_evaluation_data_keep_their_workers_each_by_its_name(make_trainer):
    data = {"a": samples(4), "b": samples(8, seed=1)}
    trainer = make_trainer(
        eval_dataset=data, data_collator=worker_of, dataloader_num_workers=1, dataloader_persistent_workers=True
    )
    loaders = {name: trainer.get_eval_dataloader(name) for name in data}
    first = {name: int(next(iter(loader))["labels"][0]) for name, loader in loaders.items()}
    again = {name: int(next(iter(trainer.get_eval_dataloader(name)))["labels"][0]) for name in data}
    assert first == again
    assert first["a"] != first["b"]


def test_the_own_evaluation_data_keep_their_workers_given_or_not(make_trainer):
    data, workers = samples(4), {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make_trainer(eval_dataset=data, **workers)
    assert trainer.get_eval_dataloader() is trainer.get_eval_dataloader(data)
    other = samples(4)
    assert trainer.get_eval_dataloader(other) is not trainer.get_eval_dataloader(other)


def test_data_that_are_given_to_evaluate_are_never_mistaken_for_others(make_trainer):
    trainer = make_trainer(
        eval_dataset=samples(4), dataloader_num_workers=1, dataloader_persistent_workers=True, model=Classifier()
    )
    own = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(samples(8, seed=3))["eval_loss"] != own
    assert trainer.evaluate()["eval_loss"] == own
    trainer.eval_dataset = samples(8, seed=3)
    assert trainer.evaluate()["eval_loss"] != own
    trainer.data_collator = lambda rows: trainer_batch(rows, scale=0.0)
    changed = trainer.evaluate()["eval_loss"]
    trainer.data_collator = lambda rows: trainer_batch(rows, scale=1.0)
    assert trainer.evaluate()["eval_loss"] != changed


def trainer_batch(rows, scale):
    return {"x": scale * torch.stack([r["x"] for r in rows]), "labels": torch.stack([r["labels"] for r in rows])}


def test_loaders_without_persistent_workers_are_built_again(make_trainer):
    trainer = make_trainer(eval_dataset=samples(4), dataloader_num_workers=1)
    assert trainer.get_eval_dataloader() is not trainer.get_eval_dataloader()


def test_a_loader_is_kept_only_for_the_objects_it_was_made_of():
    class Loader:
        persistent_workers = True

    kept, one, other = LoaderCache(), [1], [1]
    first = kept.get("a", (one,), Loader)
    assert kept.get("a", (one,), Loader) is first
    assert kept.get("a", (other,), Loader) is not first
    assert kept.get("b", (one,), Loader) is not first


def test_a_loader_says_how_many_samples_all_ranks_take_and_have(make_trainer):
    trainer = make_trainer(20, per_device_train_batch_size=4, per_device_eval_batch_size=3, eval_dataset=Shared(7))
    train, evaluation = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    assert (train.total_batch_size, train.total_dataset_length) == (4, 20)
    assert evaluation.total_batch_size == 3
    four_ranks = SimpleNamespace(rank=1, world_size=4, device=torch.device("cpu"))
    for data in (samples(20), Shared(20)):
        assert train_loader(data, list, trainer.args, four_ranks).total_batch_size == 16


# Seeds and orders


@pytest.mark.parametrize(("change", "now"), [(lambda data: data.pop(), 7), (lambda data: data.extend(samples(2)), 10)])
def test_data_of_another_length_is_refused_where_the_next_epoch_begins(make_trainer, change, now):
    data = samples(8)
    changes = on("on_epoch_end", lambda **_: change(data))
    trainer = make_trainer(train_dataset=data, num_train_epochs=2, callbacks=[changes])
    with pytest.raises(ValueError, match=rf"held 8 samples when the run began and holds {now} where epoch 1 begins"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_a_loader_given_as_data_is_refused(make_trainer):
    loader = DataLoader(samples(8), batch_size=4)
    with pytest.raises(TypeError, match=r"a DataLoader was given as a data set.*loader\.dataset"):
        make_trainer(train_dataset=loader).train()
    with pytest.raises(TypeError, match=r"override of get_train_dataloader, get_eval_dataloader"):
        make_trainer(8).evaluate(loader)
