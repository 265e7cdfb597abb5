"""Rates of several processes are those of all together, by a clock that every forward in training moves by a second."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import run_ranks

WIDTH, VOCABULARY, HIDDEN = 6, 10, 16
PER_TOKEN = 6 * (HIDDEN * HIDDEN + HIDDEN * 3)


class Reader(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.middle, self.head = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, 3, bias=False)
        self._clock = clock

    def forward(self, input_ids, labels=None):
        self._clock[0] += 1
        logits = self.head(self.middle(self.embedding(input_ids))).mean(1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Stream(IterableDataset):
    def __init__(self, rows):
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)


class Watch(TrainerCallback):
    def __init__(self):
        self.trainer, self.seen = None, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.seen.append((state.global_step, dict(self.trainer.current_run.window.clock.rates)))


def rates(folder, strategy, streams):
    """Train three steps on 17 rows: of 8, 8 and 1, where a rank has none of its own in the last."""
    torch.manual_seed(0)
    clock = [100.0]
    rows = [{"input_ids": torch.ones(WIDTH, dtype=torch.int64), "labels": torch.tensor(n % 3)} for n in range(17)]
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        strategy=strategy,
        use_cpu=True,
        disable_tqdm=True,
        peak_flops=100.0,
    )
    watch = Watch()
    trainer = Trainer(
        model=Reader(clock), args=args, train_dataset=Stream(rows) if streams else rows, callbacks=[watch]
    )
    watch.trainer = trainer
    time.perf_counter = lambda: clock[0]
    trainer.train()
    trainer.strategy.close()
    return watch.seen


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("streams", [False, True], ids=["by index", "a stream"])
def test_two_ranks_count_every_sample_once_and_share_the_peak_of_both(tmp_path, strategy, streams):
    for seen in run_ranks(rates, 2, str(tmp_path), strategy, streams, timeout_s=120):
        assert [step for step, _ in seen] == [1, 2, 3]
        for (_, figures), samples in zip(seen, (8, 8, 1), strict=True):
            assert figures["samples_per_second"] == samples
            assert figures["tokens_per_second"] == samples * WIDTH
            assert figures["flops_per_second"] == samples * WIDTH * PER_TOKEN
            assert figures["mfu"] == samples * WIDTH * PER_TOKEN / 200
            assert figures["memory_peak_bytes"] >= figures["memory_bytes"] > 0
