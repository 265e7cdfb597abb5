"""Data that cannot be what the run was begun with is refused in words."""

import pytest
from small_models import samples
from torch.utils.data import DataLoader

from tr_core import TrainerCallback


@pytest.mark.parametrize(("change", "now"), [(lambda data: data.pop(), 7), (lambda data: data.extend(samples(2)), 10)])
def test_data_of_another_length_is_refused_where_the_next_epoch_begins(make_trainer, change, now):
    data = samples(8)

    class Changes(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            change(data)

    trainer = make_trainer(train_dataset=data, num_train_epochs=2, callbacks=[Changes()])
    with pytest.raises(ValueError, match=rf"held 8 samples when the run began and holds {now} where epoch 1 begins"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_a_loader_given_as_data_is_refused(make_trainer):
    loader = DataLoader(samples(8), batch_size=4)
    with pytest.raises(TypeError, match=r"a DataLoader was given as a data set.*loader\.dataset"):
        make_trainer(train_dataset=loader).train()
    with pytest.raises(TypeError, match=r"override of get_train_dataloader, get_eval_dataloader"):
        make_trainer(8).evaluate(loader)
