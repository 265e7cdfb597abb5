"""Data sets, batches, collators and loaders as users give and change them."""

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from habit_parts import Net, assert_same, at_step, batches, by_hand, logged, rows, stack, when
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset
from transformers import BatchEncoding

from tr_core import Trainer


class Positional(Net):
    """Is called with a batch by position."""

    def forward(self, *parts):
        return super().forward(*parts)


# What a batch is


def test_batches_of_a_tensor_data_set_are_given_by_position(make_trainer):
    whole = stack(rows())
    trainer, other = make_trainer(model=Positional(), train_dataset=TensorDataset(whole["x"], whole["labels"])), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


def test_a_batch_that_is_a_tensor_is_the_models_only_argument(make_trainer):
    class OneTensor(Net):
        def forward(self, both):
            return super().forward(both[:, :4], both[:, 4])

    data = [torch.cat([row["x"], row["labels"][None]]) for row in rows()]
    trainer, other = make_trainer(model=OneTensor(), train_dataset=data, data_collator=torch.stack), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


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


def test_texts_in_a_batch_reach_compute_loss(make_trainer):
    texts = []

    class Reads(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            texts.extend(inputs.pop("text"))
            return super().compute_loss(model, inputs, *args, **kwargs)

    def collate(samples):
        return {**stack([{"x": s["x"], "labels": s["labels"]} for s in samples]), "text": [s["text"] for s in samples]}

    data = [{**row, "text": str(number)} for number, row in enumerate(rows())]
    make_trainer(Reads, train_dataset=data, data_collator=collate, remove_unused_columns=False).train()
    assert texts == list("01234567")


def test_texts_that_the_usual_collator_cannot_stack_are_not_dropped_in_silence(make_trainer, caplog):
    data = [{**row, "labels": "yes"} for row in rows()]
    with pytest.raises((TypeError, ValueError), match="label"):
        make_trainer(train_dataset=data).train()


def test_numbers_and_arrays_of_samples_are_stacked(make_trainer):
    data = [{"x": row["x"].numpy(), "labels": row["labels"].item()} for row in rows()]
    trainer, other = make_trainer(train_dataset=data), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


@pytest.mark.parametrize("name", ["label", "label_ids"])
def test_labels_under_a_usual_other_name_are_labels(make_trainer, name):
    data = [{"x": row["x"], name: row["labels"].item()} for row in rows()]
    trainer, other = make_trainer(train_dataset=data), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


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


@pytest.mark.parametrize("data", [[], TensorDataset(torch.zeros(0, 4))], ids=["list", "tensors"])
def test_an_empty_data_set_is_refused(make_trainer, data):
    with pytest.raises(ValueError, match=r"no batch|empty|0 samples"):
        make_trainer(train_dataset=data, max_steps=-1).train()


def test_one_sample_is_a_run_of_one_step_an_epoch(make_trainer):
    trainer, other = make_trainer(train_dataset=rows(1), max_steps=-1, num_train_epochs=3), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, [stack(rows(1))] * 3))


@pytest.mark.parametrize("change", ["grows", "shrinks"])
def test_a_data_set_whose_length_changes_in_the_run_is_refused(make_trainer, change):
    data, seen = rows(4), []

    def resize(**_):
        if len(data) == 4:
            data.extend(rows(8)[4:]) if change == "grows" else data.pop()

    note = when(on_epoch_end=resize, on_micro_batch_end=lambda inputs, **_: seen.extend(inputs["labels"].tolist()))
    trainer = make_trainer(train_dataset=data, max_steps=-1, num_train_epochs=2, callbacks=[note])
    now = 8 if change == "grows" else 3
    with pytest.raises(ValueError, match=f"held 4 samples when the run began and holds {now} where epoch 1 begins"):
        trainer.train()
    assert seen == pytest.approx([row["labels"].item() for row in rows(4)])


class Staged(torch.utils.data.Dataset):
    """Multiplies its features by a stage that may be set from outside."""

    def __init__(self, number=4):
        self.data, self.stage = rows(number), 1.0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        row = self.data[index]
        return {"x": row["x"] * self.stage, "labels": row["labels"]}


def staged(*stages, number=4):
    return [{"x": batch["x"] * stage, "labels": batch["labels"]} for stage in stages for batch in batches(rows(number))]


def test_set_epoch_of_a_data_set_is_called_for_every_epoch(make_trainer):
    class Epochs(Staged):
        def set_epoch(self, epoch):
            self.stage = 1.0 + epoch

    trainer, other = make_trainer(train_dataset=Epochs(), max_steps=6), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, staged(1.0, 2.0, 3.0)))


def test_an_attribute_set_through_the_loader_is_that_of_the_data_set(make_trainer):
    data = Staged()

    def harder(train_dataloader, state, **_):
        train_dataloader.dataset.stage = 1.0 + round(state.epoch)

    trainer, other = make_trainer(train_dataset=data, callbacks=[when(on_epoch_begin=harder)]), Net()
    trainer.train()
    assert data.stage == 2.0
    assert logged(trainer) == pytest.approx(by_hand(other, staged(1.0, 2.0)))


def test_an_attribute_of_the_data_set_itself_changed_by_a_callback_acts(make_trainer):
    data = Staged()
    trainer, other = (
        make_trainer(train_dataset=data, callbacks=[at_step(2, lambda **_: setattr(data, "stage", 2.0))]),
        Net(),
    )
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, staged(1.0, 2.0)))


def test_another_data_set_between_two_runs_is_trained_on(make_trainer):
    trainer, other = make_trainer(max_steps=2), Net()
    trainer.train()
    trainer.train_dataset = rows(4, seed=9)
    trainer.train()
    by_hand(other, batches(rows())[:2])
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows(4, seed=9))))
    assert_same(trainer.model, other)


@pytest.mark.parametrize("event", ["on_epoch_begin", "on_epoch_end"])
def test_another_data_set_set_between_epochs_is_refused(make_trainer, event):
    trainer, other = make_trainer(train_dataset=rows(4)), Net()

    def change(state, **_):
        if state.global_step == 2:
            trainer.train_dataset = rows(4, seed=9)

    trainer.add_callback(when(**{event: change}))
    with pytest.raises(RuntimeError, match=r"trainer\.train_dataset was assigned while training"):
        trainer.train()
    by_hand(other, batches(rows(4)))
    assert_same(trainer.model, other)


def test_other_evaluation_data_set_in_a_run_is_evaluated(make_trainer):
    trainer = make_trainer(eval_dataset=rows(4), eval_strategy="steps", eval_steps=2, learning_rate=0.0)
    trainer.add_callback(at_step(3, lambda **_: setattr(trainer, "eval_dataset", rows(6, seed=9))))
    trainer.train()
    expected = [Net()(**stack(data))["loss"].item() for data in (rows(4), rows(6, seed=9))]
    assert logged(trainer, "eval_loss") == pytest.approx(expected)


def test_parts_and_unions_of_data_sets_are_read_like_any_other(make_trainer):
    data = ConcatDataset([Subset(rows(), range(4)), Subset(rows(), range(4, 8))])
    trainer, other = make_trainer(train_dataset=data), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


def test_columns_of_text_in_a_table_are_left_out_and_others_are_tensors(make_trainer):
    table = Dataset.from_dict({
        "text": list("abcdefgh"),
        "x": [row["x"].tolist() for row in rows()],
        "labels": [row["labels"].item() for row in rows()],
    })  # fmt: skip
    trainer, other = make_trainer(train_dataset=table), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


def test_a_transform_set_on_a_table_gets_the_columns_it_needs(make_trainer):
    table = Dataset.from_dict({"number": list(range(8))})
    table.set_transform(lambda part: stack([rows()[number] for number in part["number"]]))
    trainer, other = make_trainer(train_dataset=table), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


def test_a_stream_of_samples_trains_until_max_steps(make_trainer):
    stream = IterableDataset.from_generator(lambda: iter(rows()))
    trainer, other = make_trainer(train_dataset=stream, max_steps=6), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, [*batches(rows()), *batches(rows())[:2]]))


def test_half_an_epoch_is_half_of_its_steps(make_trainer):
    trainer, other = make_trainer(max_steps=-1, num_train_epochs=1.5), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, [*batches(rows()), *batches(rows())[:2]]))


def test_an_array_given_as_the_data_is_rows_without_labels_which_is_refused(make_trainer):
    array = np.stack([row["x"].numpy() for row in rows()])
    with pytest.raises(
        ValueError, match=r"holds no loss, only \['logits'\]; the model was given Tensor. Give it labels"
    ):
        make_trainer(train_dataset=array).train()


def test_a_loader_given_as_the_data_set_is_refused(make_trainer):
    loader = DataLoader(rows(), batch_size=2)
    for call in (make_trainer(train_dataset=loader).train, lambda: make_trainer().evaluate(loader)):
        with pytest.raises(TypeError, match="DataLoader was given as a data set.*override of get_train_dataloader"):
            call()


def test_a_generator_given_as_the_data_set_is_refused_at_its_second_epoch(make_trainer):
    with pytest.raises((TypeError, ValueError), match="generator"):
        make_trainer(train_dataset=(row for row in rows(4))).train()


# Loaders


def test_an_overridden_loader_decides_order_and_batch_size(make_trainer):
    class Own(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset[::-1], batch_size=4, collate_fn=self.data_collator)

    trainer, other = make_trainer(Own, max_steps=2), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows()[::-1], 4)))


def test_a_loader_that_is_a_list_of_batches_will_do(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.get_train_dataloader = lambda: batches(rows())
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


def test_a_loader_prepared_by_an_accelerator_will_do(make_trainer):
    from accelerate import Accelerator

    class Own(Trainer):
        def get_train_dataloader(self):
            return Accelerator(cpu=True).prepare(DataLoader(self.train_dataset, batch_size=2))

    trainer, other = make_trainer(Own), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


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


def test_a_batch_taken_from_the_loader_in_a_callback_is_not_missing_from_the_run(make_trainer):
    taken = []
    take = when(on_train_begin=lambda train_dataloader, **_: taken.append(next(iter(train_dataloader))))
    trainer, other = make_trainer(callbacks=[take]), Net()
    trainer.train()
    assert torch.equal(taken[0]["x"], batches(rows())[0]["x"])
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


def test_the_loader_in_a_callback_knows_the_data_set_and_its_length(make_trainer):
    data, found = Staged(), []
    look = when(
        on_train_begin=lambda train_dataloader, **_: found.append((train_dataloader.dataset, len(train_dataloader)))
    )
    make_trainer(train_dataset=data, callbacks=[look]).train()
    assert found[0][0].stage == 1.0
    assert len(found[0][0]) == 4
    assert found[0][1] == 2


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
