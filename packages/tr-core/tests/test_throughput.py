"""Measure rates between logs with a clock that the test moves: a second in every forward."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from support.callbacks import Stop, StopAt, on
from support.checkpointer import MemoryCheckpointer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.flop_counter import FlopCounterMode

from tr_core import SingleDevice, Trainer
from tr_core.data.sampler import MicroBatch
from tr_core.log_window import LogWindow
from tr_core.run import Run
from tr_core.throughput import Share

WIDTH = 6


@pytest.fixture
def now(monkeypatch):
    """A clock that stands until it is moved: `now[0] += seconds`."""
    moment = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: moment[0])
    return moment


class Reader(nn.Module):
    """A model of rows of token ids; a forward in training takes a second, one in an evaluation a hundred."""

    def __init__(self, now):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)
        self._now = now

    def forward(self, input_ids, labels=None):
        self._now[0] += 1 if self.training else 100
        logits = self.head(self.embedding(input_ids)).mean(1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


PER_TOKEN = 6 * (4 * 3 + 3)


def rows(number):
    return [{"input_ids": torch.ones(WIDTH, dtype=torch.int64), "labels": torch.tensor(n % 3)} for n in range(number)]


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, number):
        self._number = number

    def __iter__(self):
        return iter(rows(self._number))


class Watcher:
    """Keeps the rates at each log of a window."""

    def __init__(self):
        self.seen, self.trainer = [], None

    def __call__(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.seen.append((state.global_step, self.trainer.current_run.window.clock.rates))

    def train(self, trainer, **how):
        self.trainer = trainer
        trainer.train(**how)

    def of(self, name):
        return [(step, rates.get(name)) for step, rates in self.seen]


@pytest.fixture
def watch(make_trainer, now):
    """Train, and return what watched the rates."""

    def run(number=20, **changes):
        watcher = Watcher()
        changes.setdefault("train_dataset", rows(number))
        callbacks = [on("on_log", watcher), *changes.pop("callbacks", [])]
        watcher.train(make_trainer(model=Reader(now), callbacks=callbacks, **changes))
        return watcher

    return run


def parts():
    window = LogWindow(SingleDevice(use_cpu=True))
    return window.clock, window.throughput


def test_rates_are_those_of_the_steps_since_the_last_log(watch):
    seen = watch(20, logging_steps=2)
    assert seen.of("samples_per_second") == [(2, 4.0), (4, 4.0)]
    assert seen.of("tokens_per_second") == [(2, 4.0 * WIDTH), (4, 4.0 * WIDTH)]
    assert seen.of("flops_per_second") == [(2, 4.0 * WIDTH * PER_TOKEN), (4, 4.0 * WIDTH * PER_TOKEN)]


def test_the_end_of_a_run_has_the_rates_of_the_steps_after_the_last_log(watch, tmp_path):
    watch(18, logging_steps=2)
    lines = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    rates = [event for event in map(json.loads, lines) if event["event"] == "rates"]
    assert [(event["step"], event["samples_per_second"]) for event in rates] == [(2, 4.0), (4, 4.0), (5, 2.0)]


def test_the_time_of_evaluations_is_not_that_of_steps(watch):
    seen = watch(20, logging_steps=1, eval_strategy="steps", eval_steps=1, eval_on_start=True, eval_dataset=rows(4))
    assert seen.of("samples_per_second") == [(step, 4.0) for step in range(1, 6)]


def test_with_accumulation_a_log_counts_every_micro_batch_and_the_short_last_step(watch):
    seen = watch(22, logging_steps=1, gradient_accumulation_steps=2)
    # Steps of 8, 8 and 6 samples in two micro-batches each.
    assert seen.of("samples_per_second") == [(1, 4.0), (2, 4.0), (3, 3.0)]


def test_a_window_over_two_epochs_counts_the_short_last_batch_of_the_first(watch):
    seen = watch(6, logging_steps=3, num_train_epochs=3)
    assert seen.of("samples_per_second") == [(3, (4 + 2 + 4) / 3), (6, (2 + 4 + 2) / 3)]


def test_a_stream_without_a_length_counts_its_samples(watch):
    seen = watch(train_dataset=Stream(6), logging_steps=2, max_steps=4)
    assert seen.of("samples_per_second") == [(2, 3.0), (4, 3.0)]
    assert seen.of("tokens_per_second") == [(2, 3.0 * WIDTH), (4, 3.0 * WIDTH)]


def test_batches_of_any_size_of_a_loader_of_the_users_count_as_they_are(watch):
    sizes = [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10, 11]]

    class Own(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_sampler=sizes)

    seen = watch(12, trainer_class=Own, logging_steps=2)
    assert seen.of("samples_per_second") == [(2, 2.0), (4, 4.0)]
    assert seen.of("tokens_per_second") == [(2, 2.0 * WIDTH), (4, 4.0 * WIDTH)]


@pytest.mark.parametrize("data", [rows(38), Stream(38)], ids=["by index", "a stream"])
def test_a_run_resumed_inside_an_epoch_and_a_window_counts_what_it_trains_itself(saving, now, tmp_path, data):
    options = {"model": Reader(now), "train_dataset": data, "logging_steps": 2, "save_steps": 1, "max_steps": 10}
    options |= {"checkpointer": MemoryCheckpointer(tmp_path), "per_device_train_batch_size": 4}
    with pytest.raises(Stop):
        saving(StopAt(3), **options).train()
    watcher = Watcher()
    watcher.train(saving(on("on_log", watcher), **options), resume_from_checkpoint=True)
    assert watcher.of("samples_per_second") == [(4, 4.0), (6, 4.0), (8, 4.0), (10, 3.0)]


def test_tokens_that_the_run_counts_itself_are_those_of_the_rate(watch):
    data = rows(8)
    for row in data:
        row["input_ids"] = torch.tensor([1, 1, 1, 0, 0, 0])
    processor = SimpleNamespace(pad_token_id=0)
    seen = watch(
        train_dataset=data,
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",
        processing_class=processor,
        data_collator=lambda samples: {key: torch.stack([s[key] for s in samples]) for key in samples[0]},
    )
    assert seen.of("tokens_per_second") == [(1, 12.0), (2, 12.0)]
    assert seen.of("flops_per_second") == [(1, 24.0 * PER_TOKEN), (2, 24.0 * PER_TOKEN)]  # padding is computed too


def test_a_model_without_tokens_has_no_rate_of_tokens_and_no_operations(make_trainer):
    watcher = Watcher()
    watcher.train(make_trainer(8, callbacks=[on("on_log", watcher)]))
    for _, rates in watcher.seen:
        assert {"samples_per_second"} <= set(rates) <= {"samples_per_second", "memory_bytes", "memory_peak_bytes"}


def test_logs_have_no_new_key(watch):
    seen = watch(8, logging_steps=1)
    keys = {key for entry in seen.trainer.state.log_history for key in entry}
    assert not any("flops" in key or "mfu" in key or "memory" in key for key in keys - {"total_flos"})


def test_ranks_add_up_and_memory_is_that_of_the_fullest_device(now):
    clock, rates = parts()
    rates.begin(0)
    rates.samples = 8  # known to every rank
    now[0] += 2
    rates.close([Share(1, 30, 0, 5, 50, 1e12), Share(3, 10, 0, 7, 40, 2e12)], None)
    assert clock.rates == {
        "samples_per_second": 6.0,
        "tokens_per_second": 20.0,
        "memory_bytes": 7,
        "memory_peak_bytes": 50,
    }


def test_mfu_is_the_share_of_the_peaks_of_all_ranks_and_absent_if_one_is_unknown(now):
    for peaks, expected in (((100.0, 300.0), 0.25), ((100.0, None), None)):
        clock, rates = parts()
        share = rates.share(nn.Linear(2, 1, bias=False), torch.device("cpu"), None, 1.0)
        rates.samples = 1
        now[0] += 1
        rates.close([share._replace(positions=10 - 4 * n, peak_flops=p) for n, p in enumerate(peaks)], None)
        assert clock.rates["flops_per_second"] == 4 * 2 * 16  # the first layer's input needs no gradient
        assert clock.rates.get("mfu") == (None if expected is None else 128 / 400)


def test_processes_that_compute_a_sample_together_have_their_peaks_together():
    shares = [parts()[1].share(nn.Linear(2, 1), torch.device("cpu"), None, 100.0, together) for together in (1, 2)]
    assert [share.peak_flops for share in shares] == [100.0, 200.0]


def test_what_is_frozen_during_a_run_counts_less_from_the_next_log(watch):
    def freeze(args, state, control, model, **kwargs):
        if state.global_step == 2:
            model.embedding.requires_grad_(False)

    rates = dict(watch(12, logging_steps=1, callbacks=[on("on_step_end", freeze)]).of("flops_per_second"))
    # Its head is then the first trainable layer: without a gradient for its input.
    assert rates == {1: 24.0 * PER_TOKEN, 2: 24.0 * PER_TOKEN * 4 / 6, 3: 24.0 * PER_TOKEN * 4 / 6}


def test_the_steps_time_is_theirs_before_an_evaluation_and_a_save_begin(saving, monkeypatch):
    waited = []
    trainer = saving(save_steps=5, eval_strategy="steps", eval_steps=5)
    monkeypatch.setattr(
        Run, "settle", lambda run: waited.append((run.methods.state.global_step, run.window.clock.phase))
    )
    trainer.train()
    assert waited == [(5, "compute"), (5, "compute"), (10, "compute"), (10, "compute")]


def test_only_a_device_with_a_queue_is_waited_for(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append(1))
    for kind in ("cpu", "cuda", "xla"):
        Run.settle(SimpleNamespace(strategy=SimpleNamespace(device=SimpleNamespace(type=kind))))
    assert len(calls) == 1


def test_a_window_without_a_step_leaves_the_rates_and_one_without_time_has_none(now):
    clock, rates = parts()
    clock.rates = before = {"samples_per_second": 1.0}
    rates.close([Share(0, 0, 0, 1, 1, None)], None)
    assert clock.rates is before
    rates.samples = 4
    rates.close([Share(0, 0, 0, 1, 1, None)], None)
    assert clock.rates == {"memory_bytes": 1, "memory_peak_bytes": 1}


def test_a_filler_has_no_positions():
    _, rates = parts()
    count = rates.counter("input_ids")
    inputs = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    count(MicroBatch(inputs, 1.0, 2, 2))
    count(MicroBatch(inputs, 0.0, 2, 2))
    assert rates.positions == 6


def by_hand(samples):
    """Return the operations that torch counts for a forward and backward of the model over some samples."""
    torch.manual_seed(0)
    with FlopCounterMode(display=False) as counter:
        Reader([0]).train()(torch.ones(samples, WIDTH, dtype=torch.int64), torch.zeros(samples, dtype=torch.int64))[
            "loss"
        ].backward()
    return counter.get_total_flops()


def test_counted_operations_are_torchs_and_their_micro_batch_is_in_no_rate(watch):
    seen = watch(22, logging_steps=2, count_flops=True, gradient_accumulation_steps=2, max_steps=4)
    # The first step's second micro-batch, the second step, and then 4 + 2 and 8 samples.
    assert seen.of("samples_per_second") == [(2, 4.0), (4, 14 / 4)]
    each = by_hand(4) / (4 * WIDTH)
    assert seen.of("flops_per_second") == [(2, 4.0 * WIDTH * each), (4, 14 / 4 * WIDTH * each)]


def test_operations_are_counted_for_samples_where_a_model_has_no_tokens(make_trainer, model, now):
    watcher = Watcher()
    trainer = make_trainer(12, callbacks=[on("on_log", watcher)], count_flops=True, logging_steps=3)
    model.register_forward_hook(lambda *given: now.__setitem__(0, now[0] + 1))
    watcher.train(trainer)
    per_sample = 2 * (8 * 16 * 2 + 16 * 3 * 3)  # the input of the first layer needs no gradient
    assert watcher.of("flops_per_second") == [(3, 4.0 * per_sample)]


def test_counting_changes_no_number_of_the_run(make_trained, model):
    start = {name: value.clone() for name, value in model.state_dict().items()}
    make_trained(20, model=model)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(start)
    make_trained(20, model=model, count_flops=True)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_the_peak_of_the_arguments_gives_mfu_and_one_that_is_not_known_none(watch):
    assert watch(8).of("mfu") == [(1, None), (2, None)]  # the CPU's
    rate = 4.0 * WIDTH * PER_TOKEN
    assert watch(8, peak_flops=4 * rate).of("mfu") == [(1, 0.25), (2, 0.25)]


def test_a_wrong_peak_in_the_environment_ends_a_run_before_its_first_step(make_trainer, monkeypatch):
    monkeypatch.setenv("TR_PEAK_FLOPS", "fast")
    trainer = make_trainer(8)
    with pytest.raises(ValueError, match="TR_PEAK_FLOPS='fast' is not a positive number"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_an_error_while_operations_are_counted_ends_the_counting(make_trainer, model):
    model.register_forward_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_trainer(8, count_flops=True).train()
    assert by_hand(1) > 0
