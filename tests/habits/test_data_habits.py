"""Data sets, batches, collators and loaders as users give and change them."""

import pytest
import torch
from habit_parts import Net, at_step, batches, by_hand, logged, rows, stack, when
from transformers import BatchEncoding

from tr_core import Trainer

# What a batch is


def test_a_batch_of_a_tokenizers_kind_is_given_by_name(make_trainer):
    kinds = []

    class Notes(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            kinds.append(type(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer, other = make_trainer(Notes, data_collator=lambda samples: BatchEncoding(stack(samples))), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))
    assert set(kinds) == {BatchEncoding}


def test_labels_under_a_name_of_ones_own_are_those_of_label_names(make_trainer):
    class Own(Net):
        def forward(self, x, target=None):
            return super().forward(x, target)

    data = [{"x": row["x"], "target": row["labels"]} for row in rows()]
    seen = []
    trainer = make_trainer(
        model=Own(), train_dataset=data, eval_dataset=data[:4], compute_metrics=lambda p: seen.append(p.label_ids) or {}
    )
    trainer.label_names = ["target"]
    metrics, other = trainer.evaluate(), Net()
    trainer.train()
    assert metrics["eval_loss"] == pytest.approx(other(**stack(rows()[:4]))["loss"].item())
    assert seen[0] == pytest.approx(stack(rows()[:4])["labels"].numpy())
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


# Data sets


def test_other_evaluation_data_set_in_a_run_is_evaluated(make_trainer):
    trainer = make_trainer(eval_dataset=rows(4), eval_strategy="steps", eval_steps=2, learning_rate=0.0)
    trainer.add_callback(at_step(3, lambda **_: setattr(trainer, "eval_dataset", rows(6, seed=9))))
    trainer.train()
    expected = [Net()(**stack(data))["loss"].item() for data in (rows(4), rows(6, seed=9))]
    assert logged(trainer, "eval_loss") == pytest.approx(expected)


# Loaders


def test_a_loader_gone_through_by_hand_before_training_changes_nothing(make_trainer):
    trainer, other = make_trainer(train_sampling_strategy="random"), make_trainer(train_sampling_strategy="random")
    looked_at = [batch["labels"].tolist() for batch in trainer.get_train_dataloader()]
    seen = []
    trainer.add_callback(when(on_micro_batch_end=lambda inputs, **_: seen.append(inputs["labels"].tolist())))
    trainer.train()
    other.train()
    assert looked_at == seen
    assert logged(trainer) == logged(other)
    assert len(trainer.get_train_dataloader()) == 4


def test_a_sampler_may_draw_from_data_that_grows_in_the_run(make_trainer):
    data, seen = rows(4), []

    class Last(torch.utils.data.Sampler):
        """Gives the last four samples there are."""

        def __len__(self):
            return 4

        def __iter__(self):
            return iter(range(len(data) - 4, len(data)))

    note = when(
        on_epoch_end=lambda **_: data.extend(rows(8)[4:]),
        on_micro_batch_end=lambda inputs, **_: seen.extend(inputs["labels"].tolist()),
    )
    trainer = make_trainer(train_dataset=data, callbacks=[note])
    trainer._get_train_sampler = lambda data: Last()
    trainer.train()
    assert seen == pytest.approx([row["labels"].item() for row in rows(8)])
