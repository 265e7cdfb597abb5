"""Overrides of a step's batches, of its count and of what follows it, and what is refused in them."""

from contextlib import contextmanager
from itertools import islice

import pytest
import torch
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Classifier
from torch.utils.data import IterableDataset

from tr_core import Trainer


class Taking(Trainer):
    """Takes its batches by `take`, which a test sets."""

    @staticmethod
    def take(batches, number):
        return list(islice(batches, number))

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches = self.take(epoch_iterator, num_batches)
        return batches, self._get_num_items_in_batch(batches, device)


def taking(take):
    return type("Taking", (Taking,), {"take": staticmethod(take)})


def fresh(kind):
    torch.manual_seed(0)
    return kind()


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize(
    ("take", "said"),
    [
        (lambda batches, number: list(islice(batches, number + 1))[:number], "asked for 2 batches and takes one more"),
        (lambda batches, number: list(islice(batches, 1)), "asked for 2 batches and took 1 of epoch_iterator"),
        (lambda batches, number: list(islice(batches, number))[:1], "took 2 batches and returned 1"),
        (lambda batches, number: [], "asked for 2 batches and took 0"),
    ],
)
def test_a_position_that_would_be_lost_is_refused(make_trainer, take, said):
    trainer = make_trainer(16, trainer_class=taking(take), gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match=said):
        trainer.train()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples(18))


def test_an_override_takes_the_last_batches_of_a_stream(make_trainer):
    found = []
    for kind in (Trainer, Taking):
        options = {"gradient_accumulation_steps": 2, "max_steps": 5}
        trainer = make_trainer(trainer_class=kind, model=fresh(Classifier), train_dataset=Stream(), **options)
        trainer.train()
        found.append(weights(trainer))
    assert torch.equal(*found)


def test_the_size_of_an_accumulated_step_is_that_of_its_batches(make_trainer):
    seen = []

    class Watching(Taking):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.append(self.current_gradient_accumulation_steps)
            return super().training_step(model, inputs, num_items_in_batch)

    make_trainer(20, trainer_class=Watching, gradient_accumulation_steps=2).train()
    assert seen == [2, 2, 2, 2, 1]


def test_values_that_an_override_passes_on_are_logged(make_trainer):
    class Other(Trainer):
        def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *given, learning_rate):
            super()._maybe_log_save_evaluate(torch.full_like(tr_loss, 7.0), 3.0, *given, learning_rate=0.25)

    trainer = make_trainer(8, trainer_class=Other)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [(e["loss"], e["grad_norm"], e["learning_rate"]) for e in logged] == [(7.0, 3.0, 0.25)] * 2


def test_an_override_may_save_by_itself(make_trainer):
    class Saves(Trainer):
        def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, trial, *given, **named):
            if self.state.global_step == 2:
                self._save_checkpoint(model, trial)

    checkpointer = MemoryCheckpointer()
    make_trainer(12, trainer_class=Saves, checkpointer=checkpointer).train()
    assert checkpointer.saves == [2]


def test_what_belongs_to_a_run_is_refused_outside_of_one(make_trainer):
    trainer = make_trainer()
    assert (trainer._globalstep_last_logged, trainer._total_loss_scalar) == (0, 0.0)
    trainer.store_flos()
    for use in (
        lambda: trainer._evaluate(None, None),
        lambda: trainer._maybe_log_save_evaluate(torch.zeros(()), None, None, None, 0, None, 0.0),
        lambda: setattr(trainer, "_total_loss_scalar", 1.0),
    ):
        with pytest.raises(RuntimeError, match="was used outside of training; it belongs to a run"):
            use()


def test_an_override_of_the_inputs_of_context_parallelism_wraps_loss_and_backward(make_trainer):
    class Split(Trainer):
        events = []

        @contextmanager
        def block(self):
            self.events.append("open")
            yield
            self.events.append("close")

        def _prepare_context_parallel_inputs(self, model, inputs):
            context, inputs = super()._prepare_context_parallel_inputs(model, inputs)
            with context():
                return self.block, {name: value[:1] for name, value in inputs.items()}

        def compute_loss(self, model, inputs, **options):
            self.events.append(len(inputs["labels"]))
            return super().compute_loss(model, inputs, **options)

        def training_step(self, *given, **named):
            loss = super().training_step(*given, **named)
            self.events.append("stepped")
            return loss

    trainer = make_trainer(8, trainer_class=Split, eval_dataset=samples(4), max_steps=2)
    trainer.train()
    assert Split.events == ["open", 1, "close", "stepped"] * 2
    Split.events.clear()
    trainer.evaluate()
    assert Split.events == ["open", 1, "close"]
