"""A loader of the user's own: epochs, errors, and the generators that its order comes from."""

import pytest
import torch
from support.data import Failing, Following, Stream, samples
from support.ranks import Alike
from torch.utils.data import DataLoader

from tr_core import Trainer
from tr_core.data.batches import batches_of
from tr_core.data.user_loader import StatefulSource


class WithOwnLoader(Trainer):
    def get_train_dataloader(self):
        return self.loader


def without_epoch(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}


def epochs_seen(make_trainer, **options):
    data = Following()
    trainer = make_trainer(trainer_class=WithOwnLoader, train_dataset=data, num_train_epochs=2, log_level="warning")
    trainer.loader = DataLoader(data, batch_size=4, collate_fn=without_epoch, **options)
    trainer.train()
    return data.calls


def test_the_data_set_of_a_loader_follows_the_epoch(make_trainer, caplog):
    with caplog.at_level("WARNING", logger="tr_core"):
        assert epochs_seen(make_trainer) == [0, 1]
    assert "live on" not in caplog.text


def test_persistent_workers_that_do_not_learn_of_the_epoch_are_named(make_trainer, caplog):
    with caplog.at_level("WARNING", logger="tr_core"):
        epochs_seen(make_trainer, num_workers=1, persistent_workers=True)
    assert "set_epoch(1) does not reach it. Leave persistent_workers out" in caplog.text


def test_an_evaluation_leaves_the_epoch_of_a_data_set():
    data = Following()
    list(batches_of(DataLoader(data, batch_size=4), 4, Alike()).iterate(0, 0))
    assert data.calls == []


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_stop_iteration_of_a_data_set_ends_no_epoch_in_silence(make_trainer, name, workers):
    trainer = make_trainer(trainer_class=WithOwnLoader)
    trainer.loader = DataLoader(Failing(StopIteration()), batch_size=4, num_workers=workers)
    trainer.get_eval_dataloader = lambda dataset: trainer.loader
    with pytest.raises(RuntimeError, match="batch 2 of epoch 0 of a DataLoader of your own: the data set"):
        getattr(trainer, name)(*([] if name == "train" else [samples(4)]))


def test_any_other_error_is_noted_with_its_batch():
    batches = batches_of(DataLoader(Failing(KeyError("text")), batch_size=4), 4, Alike())
    with pytest.raises(KeyError) as caught:
        list(batches.iterate(3, 0))
    assert caught.value.__notes__ == ["raised in batch 2 of epoch 3 of a DataLoader of your own"]


def test_a_stream_that_ends_is_no_error():
    assert len(list(batches_of(DataLoader(Stream(range(10)), batch_size=4), 4, Alike()).iterate(0, 0))) == 3


# Its order


def test_going_back_into_an_epoch_leaves_the_global_generators_as_they_are():
    batches = batches_of(DataLoader(range(20), batch_size=4, shuffle=True), 4, Alike())
    whole = [batch.inputs.tolist() for batch in batches.iterate(0, 0)]
    before = torch.get_rng_state()
    assert [batch.inputs.tolist() for batch in batches.iterate(0, 8)] == whole[2:]
    assert torch.equal(torch.get_rng_state(), before)


def test_another_number_of_processes_is_said(caplog):
    batches = batches_of(DataLoader(range(20), batch_size=4, shuffle=True), 4, Alike(2))
    source = batches.source_state()
    with caplog.at_level("WARNING", logger="tr_core"):
        batches_of(DataLoader(range(20), batch_size=4), 4, Alike()).restore_source([source, source], 0, 1)
    assert "inside an epoch of 2 processes over a loader of your own, now there are 1" in caplog.text


@pytest.mark.parametrize("source", [None, {"next": 3}])
def test_a_checkpoint_without_what_the_order_came_from_is_said(caplog, source):
    batches = batches_of(DataLoader(range(20), batch_size=4), 4, Alike())
    with caplog.at_level("WARNING", logger="tr_core"):
        batches.restore_source([source], 0, 1)
        assert "does not hold what the order of your own loader was drawn from" in caplog.text
    assert [batch.inputs.tolist() for batch in batches.iterate(0, 16)] == [[16, 17, 18, 19]]


def test_a_state_dict_that_raises_is_no_known_position():
    class Loader:
        def state_dict(self):
            raise AttributeError("dl_state_dict")

        def load_state_dict(self, state):
            raise AssertionError

    source = StatefulSource(Loader())
    assert source.is_known
    assert source.state_dict() is None
    assert not source.is_known
