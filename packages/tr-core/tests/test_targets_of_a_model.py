"""Which labels of a model of transformers are its targets, and what its loss is a mean over, is seen in the loss."""

import copy
import logging

import pytest
import torch
from support.models import Base
from torch import nn
from torch.nn import functional as F

from tr_core import SingleDevice
from tr_core.loss import LossRule

WORDS, LENGTH = 7, 5


class Model(nn.Module):
    """A model of words with what transformers gives every model: a property `loss_function`."""

    loss_function = property(lambda self: None)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.dropout, self.calls = nn.Embedding(WORDS, WORDS), nn.Dropout(0.2), 0

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        self.calls += 1
        logits = self.dropout(self.words(input_ids))
        loss = {} if labels is None else {"loss": self.loss_of(logits, labels, num_items_in_batch)}
        return {**loss, "logits": logits}


def total(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Shifts(Model):
    def loss_of(self, logits, labels, count):
        return total(logits[:, :-1], labels[:, 1:]) / count


class ByPadding(Model):
    """The names of its variables do not say that it shifts."""

    def loss_of(self, logits, labels, count):
        return total(logits, F.pad(labels, (0, 1), value=-100)[:, 1:]) / count


class MeanOfShifted(Model):
    def loss_of(self, logits, labels, count):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class WithAuxiliaryLoss(Model):
    def loss_of(self, logits, labels, count):
        return total(logits[:, :-1], labels[:, 1:]) / count + 0.01 * logits.square().mean()


class TakesAll(Model):
    """Its variable is called like those of models that shift."""

    def loss_of(self, logits, labels, count):
        shift_labels = labels
        return total(logits, shift_labels) / count


class MeanOfAll(Model):
    def loss_of(self, logits, labels, count):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class MeanOfRows(Model):
    def loss_of(self, logits, labels, count):
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses.sum(1) / labels.ne(-100).sum(1).clamp(min=1)).mean()


class RefusesOthers(Model):
    """A loss that cannot be computed of labels that are not there."""

    def loss_of(self, logits, labels, count):
        if labels.eq(-100).all(1).any():
            raise RuntimeError("a row without a target")
        return total(logits, labels) / count


SHIFTS, TAKES_ALL = (Shifts, ByPadding, MeanOfShifted, WithAuxiliaryLoss), (TakesAll, MeanOfAll, RefusesOthers)


def rows(number=6, first=0):
    """Return rows of which the later ones have fewer targets."""
    ids = torch.randint(WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(1))
    found = [{"input_ids": row, "labels": row.clone()} for row in ids]
    for index, row in enumerate(found):
        row["labels"][LENGTH - index % 4 :] = -100
    for row in found[:first]:
        row["labels"][:] = -100
    return found


def build(make_trainer, model, data=None, **options):
    settings = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    return make_trainer(model=model, train_dataset=data or rows(), **(settings | options))


def counts_of(make_trainer, model, data=None, **options):
    """Train, and return the counts that the model got in its steps."""
    counts, before = [], model.loss_of

    def noted(logits, labels, count):
        counts.append(None if count is None else int(count))
        return before(logits, labels, count)

    trainer = build(make_trainer, model, data, **options)
    order = []
    collate = trainer.data_collator
    trainer.data_collator = lambda samples: order.append(samples) or collate(samples)
    model.loss_of = noted
    trainer.train()
    labels = [torch.stack([row["labels"] for row in batch]) for batch in order]
    return counts[-len(labels) :], labels


@pytest.mark.parametrize("kind", [*SHIFTS, *TAKES_ALL])
def test_the_count_of_a_step_is_that_of_the_targets_of_its_loss(make_trainer, kind):
    counts, labels = counts_of(make_trainer, kind())
    first = 1 if kind in SHIFTS else 0
    assert counts == [int(given[:, first:].ne(-100).sum()) for given in labels]


def test_a_loss_that_cannot_be_looked_at_is_said_and_counts_all_labels(make_trainer, caplog):
    with caplog.at_level(logging.WARNING, "tr_core.trainer"):  # whatever level an earlier Trainer has set
        counts_of(make_trainer, RefusesOthers())
    said = [record.getMessage() for record in caplog.records if "cannot be seen" in record.getMessage()]
    assert len(said) == 1
    assert "RuntimeError('a row without a target'); override _get_num_items_in_batch if it is none" in said[0]


def test_memory_that_runs_out_while_looking_is_found_by_the_search_for_a_batch_size(make_trainer):
    class Large(Shifts):
        def forward(self, input_ids, labels=None, num_items_in_batch=None):
            if len(input_ids) > 1:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(input_ids, labels, num_items_in_batch)

    trainer = build(make_trainer, Large(), auto_find_batch_size=True)
    trainer.train()
    assert trainer.loss_rule.shifts is True
    assert trainer.state.train_batch_size == 1


def test_a_step_without_a_target_shows_it_too(make_trainer):
    """Ranks make the same forwards, whatever labels each has: their forwards may wait for each other."""
    model, data = Shifts(), rows(2, first=2)
    trainer = build(make_trainer, model, data)
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    assert int(trainer._get_num_items_in_batch([batch], torch.device("cpu"))) == 0
    assert trainer.loss_rule.shifts is True


def test_a_step_without_a_target_has_a_count_of_0(make_trainer):
    data = rows(6, first=2)
    counts, labels = counts_of(make_trainer, Shifts(), data, train_sampling_strategy="sequential")
    assert counts == [int(given[:, 1:].ne(-100).sum()) for given in labels]
    assert counts[0] == 0 < counts[1]


def test_looking_leaves_the_random_numbers_and_the_model_as_they_were(make_trainer):
    ends = []
    for knows in (True, False):
        model = Shifts()
        trainer = build(make_trainer, model)
        if knows:
            trainer.loss_rule.shifts = True
        trainer.train()
        ends.append((copy.deepcopy(model.state_dict()), model.calls))
    (known, calls), (looked, again) = ends
    assert torch.equal(known["words.weight"], looked["words.weight"])
    assert calls == again == 3


@pytest.mark.parametrize(
    ("kind", "over_targets"), [(MeanOfAll, True), (TakesAll, True), (MeanOfRows, False), (MeanOfShifted, True)]
)
def test_batches_of_an_evaluation_are_weighed_by_what_their_loss_is_a_mean_over(make_trainer, kind, over_targets):
    model, data = kind(), rows(4)
    found = build(make_trainer, model).evaluate(data)["eval_loss"]
    model.eval()
    first = 1 if kind in SHIFTS else 0
    losses, weights = [], []
    for batch in (data[:2], data[2:]):
        ids, labels = (torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels"))
        count = labels[:, first:].ne(-100).sum()
        losses.append(model(ids, labels, count)["loss"].item())
        weights.append(int(count) if over_targets else 2)
    wanted = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert abs(losses[0] - losses[1]) > 1e-3, "the weights matter"


def test_smoothed_labels_are_shifted_where_the_model_shifts_its_own(make_trainer):
    for kind in (Shifts, TakesAll):
        model = kind()
        trainer = build(make_trainer, model, label_smoothing_factor=0.1)
        found = trainer.evaluate(rows(2))["eval_loss"]
        ids, labels = (torch.stack([row[name] for row in rows(2)]) for name in ("input_ids", "labels"))
        logits = model.words(ids)
        if kind is Shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        assert found == pytest.approx(wanted.item(), rel=1e-6)


def test_a_step_of_prediction_outside_an_evaluation_asks_no_other_rank(make_trainer):
    trainer = build(make_trainer, Shifts())
    batch = {name: torch.stack([row[name] for row in rows(2)]) for name in ("input_ids", "labels")}
    trainer.loss_rule._strategy = OfTwo()  # whose other rank answers nothing
    loss, _, _ = trainer.prediction_step(trainer.model.eval(), batch, prediction_loss_only=True)
    logits = trainer.model.words(batch["input_ids"])[:, :-1]
    assert loss.item() == pytest.approx(F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).item())


def test_labels_that_are_not_those_of_positions_are_not_looked_at(make_trainer):
    class OfRows(Base):
        loss_function = property(lambda self: None)
        calls = 0

        def forward(self, x, labels=None, num_items_in_batch=None):
            type(self).calls += 1
            return {"loss": F.cross_entropy(self.layers(x), labels, reduction="sum") / num_items_in_batch}

    make_trainer(8, model=OfRows(), per_device_train_batch_size=4).train()
    assert OfRows.calls == 2


class OfTwo(SingleDevice):
    """A second rank, which says what it was given."""

    world_size = 2

    def __init__(self, *others):
        super().__init__("cpu")
        self.others = list(others)

    def gather_objects(self, value):
        return [value, self.others.pop(0)]


@pytest.mark.parametrize(
    ("own", "others", "shifts"),
    [
        (False, [True, False], True),
        (True, [True, False], False),
        (False, [True, True], False),
        (None, [True, False], True),
        (None, [True, None], None),
        (False, [False], None),  # the other rank has other labels
    ],
)
def test_ranks_agree_on_what_any_of_them_saw(own, others, shifts):
    rule = LossRule(Shifts(), None, OfTwo(*others))
    batch = {"labels": torch.zeros(1, 2, dtype=torch.long)}
    rule.find_shift([batch], lambda inputs: own, over_ranks=True)
    assert rule.shifts is shifts
    assert not rule._strategy.others
