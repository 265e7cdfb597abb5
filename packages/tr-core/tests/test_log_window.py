"""Count the input tokens that were trained on, and add up losses."""

import time

import pytest
import torch
from support.callbacks import on
from torch import nn

from tr_core.data.sampler import MicroBatch
from tr_core.log_window import LogWindow, TokenCounter
from tr_core.results import speed_metrics
from tr_core.single_device import SingleDevice

PAD = 9


class Reader(nn.Module):
    """A model of rows of token ids."""

    main_input_name = "tokens"

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, tokens, attention_mask=None, labels=None):
        logits = self.head(self.embedding(tokens).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def texts(number, mask=True):
    """Make rows of six positions, 1 to 6 of them tokens."""
    made = []
    for index in range(number):
        length = 1 + index % 6
        row = {"tokens": torch.tensor([1] * length + [PAD] * (6 - length)), "labels": torch.tensor(index % 3)}
        if mask:
            row["attention_mask"] = torch.tensor([1] * length + [0] * (6 - length))
        made.append(row)
    return made


def train(make_trainer, mode, number=10, mask=True, **changes):
    trainer = make_trainer(
        train_dataset=texts(number, mask),
        model=Reader(),
        include_num_input_tokens_seen=mode,
        train_sampling_strategy="sequential",
        **changes,
    )
    trainer.train()
    return trainer


def test_the_rate_is_that_of_all_tokens_since_the_start():
    metrics = speed_metrics("train", time.perf_counter() - 1000.0, num_tokens=5000)
    assert metrics["train_tokens_per_second"] == pytest.approx(5.0, rel=1e-2)


@pytest.mark.parametrize("mode", ["no", False])
def test_by_default_nothing_is_counted_or_logged(make_trainer, mode):
    trainer = train(make_trainer, mode)
    assert trainer.state.num_input_tokens_seen == 0
    assert not any("tokens" in name or name == "train_runtime" for name in trainer.state.log_history[0])


def test_counting_reads_nothing_from_the_device(make_trainer, read_counter, monkeypatch):
    """Counts of host tensors are no reads; those of batches that are on the device stay there until a log."""
    at_step_end, count = [], TokenCounter.count

    def on_the_host(self, batch):
        before = len(read_counter.reads)
        count(self, batch)
        del read_counter.reads[before:]

    monkeypatch.setattr(TokenCounter, "count", on_the_host)
    note = on("on_step_end", lambda **_: at_step_end.append(len(read_counter.reads)))
    with read_counter:
        trainer = train(make_trainer, "non_padding", number=64, callbacks=[note], logging_steps=1000)
    assert trainer.state.num_input_tokens_seen == sum(1 + index % 6 for index in range(64))
    assert at_step_end[-1] == at_step_end[2]


def test_a_batch_that_is_on_a_device_is_counted_there():
    """The meta device has no values: reading one raises, and only taking the count reads."""
    counter = TokenCounter("tokens", only_real=True, padding=PAD)
    tokens = torch.ones(2, 3, dtype=torch.int64, device="meta")
    for _ in range(2):
        counter.count(MicroBatch({"tokens": tokens}, 1.0, 2, 2))
    with pytest.raises(RuntimeError, match="meta"):
        counter.take()


def test_tokens_of_the_host_and_of_the_device_are_added_up():
    counter = TokenCounter("tokens", only_real=True, padding=PAD)
    counter.count(MicroBatch({"tokens": torch.tensor([[PAD + 1, PAD, PAD + 2]])}, 1.0, 1, 1))
    counter._on_device = torch.tensor(5)  # what a batch on a device would have left
    assert [counter.take(), counter.take()] == [7, 0]


def test_a_micro_batch_that_only_fills_up_counts_nothing():
    counter = TokenCounter("tokens")
    counter.count(MicroBatch({"tokens": torch.ones(2, 3)}, 0.0, 2, 1))
    assert counter.take() == 0
    counter.count(MicroBatch({"tokens": torch.ones(2, 3)}, 0.5, 2, 1))
    assert counter.take() == 6


@pytest.mark.parametrize("inputs", [{"ids": torch.ones(1), "labels": 1}, (torch.ones(1),)])
def test_a_batch_without_the_main_input_is_refused(inputs):
    what = r"\['ids', 'labels'\]" if isinstance(inputs, dict) else "a tuple"
    with pytest.raises(ValueError, match=f"counts the elements of 'tokens', but a batch is {what}; set model.main_inp"):
        TokenCounter("tokens").count(MicroBatch(inputs, 1.0, 1, 1))


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 3, 3)])
def test_without_mask_or_padding_token_it_is_not_guessed_what_is_padding(mask):
    inputs = {"tokens": torch.ones(1, 3), **({} if mask is None else {"attention_mask": mask})}
    with pytest.raises(ValueError, match="'non_padding' cannot tell what is padding: batches have no attention_mask"):
        TokenCounter("tokens", only_real=True).count(MicroBatch(inputs, 1.0, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_are_added_up_in_their_type_also_after_a_resume(dtype):
    batch, thirds = (
        MicroBatch({"tokens": torch.ones(2, 3)}, 1.0, 2, 2),
        [torch.tensor(n / 3, dtype=dtype) for n in (1, 4)],
    )
    strategy = SingleDevice(use_cpu=True)
    whole, resumed = LogWindow(strategy), LogWindow(strategy)
    for window in (whole, resumed):
        window.begin_step(0)
    whole.add(thirds[0], batch)
    whole.grad_norm = thirds[0]
    resumed.load([whole.read()], 0, 1)
    for window in (whole, resumed):
        window.begin_step(1)
        window.add(thirds[1], batch)
        assert window.loss_sum.dtype == dtype
        assert torch.equal(window.loss_sum, thirds[0] + thirds[1])
        assert window.read()["grad_norm"] == thirds[0].item()
