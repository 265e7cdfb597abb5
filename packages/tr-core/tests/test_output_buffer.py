"""What evaluation keeps of each batch: every value is copied once, memory is taken once, nothing is lost."""

import numpy as np
import pytest
import torch
from support.data import samples
from support.models import Classifier
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tr_core import Trainer
from tr_core.evaluation import output_buffer as rows_module
from tr_core.evaluation.output_buffer import OutputBuffer, Rows


class Counted(TorchDispatchMode):
    """Counts the bytes that torch takes from the system, and those it writes into tensors that are there already."""

    def __init__(self):
        super().__init__()
        self.taken = self.copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].numel() * args[0].element_size()
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.clone.default):
            self.taken += result.numel() * result.element_size()
        return result


def collect(number, batch_size=8, width=50, expected=None):
    """Return the joined array, and the bytes taken and copied for it."""
    batches = [torch.full((min(batch_size, number - i), width), float(i)) for i in range(0, number, batch_size)]
    collected, counted = OutputBuffer(expected), Counted()
    with counted:
        for batch in batches:
            collected.add(batch)
        joined = collected.arrays()
    return joined, counted.taken, counted.copied


@pytest.mark.parametrize("number", [1_000, 8_000, 16_001])
def test_each_value_is_copied_once_and_memory_is_taken_once(number):
    """Joining batch to batch copies all before it again: time that grows like n squared, and twice the memory."""
    joined, taken, copied = collect(number, expected=number)
    assert joined.shape == (number, 50)
    assert joined[-1, 0] == (number - 1) // 8 * 8
    assert taken == copied == joined.nbytes


@pytest.mark.parametrize("number", [2_000, 8_000, 16_000])
def test_without_a_known_number_each_value_is_copied_twice_whatever_the_number(monkeypatch, number):
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", 40_000)
    joined, taken, copied = collect(number)
    assert (np.diff(joined[:, 0]) >= 0).all()
    assert copied == 2 * joined.nbytes
    assert taken <= 2 * joined.nbytes + 40_000


def test_batches_that_grow_are_copied_three_times_at_most():
    widths, collected, counted = range(1, 200), OutputBuffer(2 * 199), Counted()
    with counted:
        for width in widths:
            collected.add(torch.ones(2, width))
        joined = collected.arrays()
    assert joined.shape == (398, 199)
    assert counted.copied <= 2 * joined.nbytes
    assert (joined == -100).sum() == sum(2 * (199 - width) for width in widths)


@pytest.mark.parametrize("expected", [None, 0, 7, 20, 1000])
@pytest.mark.parametrize("block_bytes", [1, 300, 2**20])
def test_rows_come_out_as_they_went_in_whatever_was_expected(monkeypatch, expected, block_bytes):
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(n, 3, 2, generator=generator) for n in (4, 4, 1, 0, 11)]
    rows = Rows(expected)
    for batch in batches:
        rows.add(batch)
    joined = rows.join()
    np.testing.assert_array_equal(joined, torch.cat(batches).numpy())
    assert joined.flags.c_contiguous
    assert joined.flags.writeable


@pytest.mark.parametrize("widths", [(5, 3, 1), (1, 3, 5), (3, 5, 1, 5, 2), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.uint8, torch.bfloat16])
def test_rows_of_different_widths_are_padded_with_minus_one_hundred_in_any_type(widths, dtype):
    rows = Rows(2 * len(widths))
    for width in widths:
        rows.add(torch.ones(2, width, dtype=dtype))
    joined = rows.join()
    assert joined.shape == (2 * len(widths), max(widths))
    for place, width in enumerate(widths):
        assert (joined[2 * place : 2 * place + 2, :width] == 1).all()
        assert (joined[2 * place : 2 * place + 2, width:] == -100).all()


def test_types_of_batches_are_joined_as_numpy_joins_them():
    rows = Rows()
    rows.add(torch.ones(2, dtype=torch.float16))
    rows.add(torch.ones(2, dtype=torch.float64))
    assert rows.join().dtype == np.float64


@pytest.mark.parametrize(("given", "kept"), [(torch.bfloat16, np.float32), (torch.float8_e4m3fn, np.float32)])
def test_types_that_numpy_has_not_become_float32(given, kept):
    collected = OutputBuffer()
    collected.add(torch.ones(2, 3).to(given))
    assert collected.arrays().dtype == kept


def test_scalars_are_one_row_each_batch():
    collected = OutputBuffer()
    for value in (1.0, 2.0):
        collected.add((torch.tensor(value), torch.ones(3)))
    scalars, rows = collected.arrays()
    assert scalars.tolist() == [1.0, 2.0]
    assert rows.shape == (6,)


def test_nothing_collected_is_none_and_collecting_can_begin_again():
    collected = OutputBuffer()
    assert collected.arrays() is None
    collected.add(None)
    assert collected.arrays() is None
    collected.add(torch.ones(2))
    assert collected.arrays().shape == (2,)


def test_what_is_on_the_host_is_put_away_at_once_and_is_no_view_of_the_output():
    buffer = torch.ones(2, 3)
    collected = OutputBuffer(4)
    collected.add(buffer)
    buffer.zero_()
    assert collected.arrays().sum() == 6


def test_a_model_that_gives_one_buffer_again_and_again_is_collected_right(make_trainer):
    class Reuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.buffer = torch.empty(2, 8)

        def forward(self, x):
            return {"logits": torch.mul(x, self.weight, out=self.buffer[: len(x)])}

    data = [{"x": row["x"]} for row in samples(5)]
    found = make_trainer(model=Reuses(), per_device_eval_batch_size=2).predict(data).predictions
    np.testing.assert_array_equal(found, torch.stack([row["x"] for row in data]).numpy())


def test_batches_that_stay_apart_are_arrays_of_their_own():
    collected = OutputBuffer(concatenate=False)
    collected.add((torch.ones(2, 3), {"a": torch.ones(2, dtype=torch.bfloat16)}))
    collected.add((torch.ones(1, 4), {"a": torch.ones(1, dtype=torch.bfloat16)}))
    first, second = collected.arrays()
    assert (first[0].shape, second[0].shape, first[1]["a"].dtype) == ((2, 3), (1, 4), np.float32)
    assert all(isinstance(leaf, np.ndarray) for leaf in tree_leaves([first, second]))


# What a prediction keeps


class Running:
    """Counts samples batch by batch."""

    def __init__(self):
        self.number = 0

    def __call__(self, prediction, compute_result):
        self.number += len(prediction.predictions)
        return {"number": self.number} if compute_result else {}


def test_predict_returns_predictions_also_with_metrics_of_batches(make_trainer):
    model, rows = Classifier(), samples(7)
    trainer = make_trainer(
        model=model, compute_metrics=Running(), batch_eval_metrics=True, per_device_eval_batch_size=3
    )
    output = trainer.predict(rows)
    with torch.no_grad():
        wanted = model.eval()(torch.stack([row["x"] for row in rows]))["logits"].numpy()
    np.testing.assert_allclose(output.predictions, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(output.label_ids, [int(row["labels"]) for row in rows])
    assert output.metrics["test_number"] == 7


def test_an_evaluation_with_metrics_of_batches_keeps_none(make_trainer):
    trainer = make_trainer(
        model=Classifier(), compute_metrics=Running(), batch_eval_metrics=True, per_device_eval_batch_size=3
    )
    output = trainer.evaluation_loop(trainer.get_test_dataloader(samples(7)), "Evaluation")
    assert output.predictions is None
    assert output.metrics["eval_number"] == 7


class Pairs(nn.Module):
    """Pulls two views of a sample together; has no labels, as CLIP."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, return_loss=True):
        seen = self.layer(x)
        outputs = {"embeddings": seen}
        return {"loss": (seen**2).mean(), **outputs} if return_loss else outputs


class ReturnsPair(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def test_metrics_are_computed_of_a_model_that_needs_no_labels(make_trainer):
    rows, seen = [{"x": row["x"]} for row in samples(7)], []

    def metrics(prediction):
        seen.append((prediction.predictions.shape, prediction.label_ids))
        return {"norm": float((prediction.predictions**2).mean())}

    trainer = make_trainer(8, ReturnsPair, model=Pairs(), compute_metrics=metrics, per_device_eval_batch_size=3)
    found = trainer.evaluate(rows)
    assert seen == [((7, 4), ())]
    assert found["eval_norm"] > 0
    assert abs(found["eval_loss"] - found["eval_norm"]) < 1e-5
    assert trainer.predict(rows).metrics["test_norm"] == found["eval_norm"]


def test_a_batch_may_ask_for_no_loss(make_trainer):
    rows = [{"x": row["x"], "return_loss": False} for row in samples(4)]

    def collate(found):
        return {"x": torch.stack([row["x"] for row in found]), "return_loss": found[0]["return_loss"]}

    output = make_trainer(8, model=Pairs(), data_collator=collate).predict(rows)
    assert "test_loss" not in output.metrics
    assert output.predictions.shape == (4, 4)
