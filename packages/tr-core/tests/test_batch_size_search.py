"""Smaller micro-batches where memory runs out: the same samples in every step, none lost, none used twice."""

import weakref

import pytest
import torch
from support.callbacks import on
from support.data import Stream, samples
from support.models import Classifier, CountedSum
from support.runs import log_of
from torch import nn
from torch.utils.data import DataLoader

from tr_core import Trainer, TrainerCallback

MESSAGES = (
    "CUDA out of memory. Tried to allocate 20.00 GiB",
    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
    "not enough memory: you tried to allocate 9 bytes.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "MPS backend out of memory (MPS allocated: 9 GB)",
)


def numbered(number):
    """Return rows that say which sample they are."""
    return [{**row, "index": torch.tensor(i)} for i, row in enumerate(samples(number))]


class Limited(nn.Module):
    """Runs out of memory above a number of samples, from some forward on; notes what its forwards used."""

    def __init__(self, inner, limit, first_forward=1, error=None):
        super().__init__()
        self.inner, self.limit, self.first_forward = inner, limit, first_forward
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        self.forwards, self.used = 0, []
        self.register_buffer("drawn", torch.zeros(()))

    def forward(self, x, labels=None, index=None, **kwargs):
        if self.training:
            self.forwards += 1
        self.drawn += torch.rand(())
        kept = self.inner(x, labels, **kwargs)
        if self.forwards >= self.first_forward and len(x) > self.limit:
            raise self.error
        if self.training:
            self.used.append(index.tolist())
        return kept


def limited(limit, kind=Classifier, **options):
    torch.manual_seed(0)
    return Limited(kind(), limit, **options)


def train(make_trainer, model, number=44, **options):
    common = {"optim": "sgd", "learning_rate": 0.1, "num_train_epochs": 2, "max_grad_norm": 0.0, "logging_steps": 2}
    trainer = make_trainer(model=model, train_dataset=numbered(number), **{**common, **options})
    trainer.train()
    return trainer


def weights(trainer):
    return list(trainer.model.inner.parameters())


def same(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(weights(mine), weights(theirs), strict=True))


@pytest.mark.parametrize("kind", [Classifier, CountedSum])
@pytest.mark.parametrize(
    ("batch", "accumulation", "limit", "found"),
    [(8, 1, 4, 4), (8, 1, 3, 2), (12, 1, 5, 4), (12, 2, 9, 8), (6, 1, 1, 1)],
)
def test_a_run_is_the_one_that_had_the_smaller_batch_from_the_start(
    make_trainer, kind, batch, accumulation, limit, found
):
    smaller = {"per_device_train_batch_size": found, "gradient_accumulation_steps": batch * accumulation // found}
    expected = train(make_trainer, limited(limit, kind), **smaller)
    model = limited(limit, kind)
    larger = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    trainer = train(make_trainer, model, auto_find_batch_size=True, **larger)
    assert log_of(trainer, "loss") == log_of(expected, "loss")
    assert same(trainer, expected)
    assert model.used == expected.model.used
    assert torch.equal(model.drawn, expected.model.drawn)
    assert trainer.state.global_step == trainer.state.max_steps == expected.state.max_steps
    assert trainer.state.epoch == expected.state.epoch == 2.0
    assert trainer.state.train_batch_size == found


def test_a_step_in_the_middle_of_a_run_is_made_again_without_its_samples_being_lost_or_repeated(make_trainer):
    """The fifth step's second micro-batch is the first that does not fit."""
    model = limited(4, first_forward=10)
    larger = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    trainer = train(make_trainer, model, number=48, auto_find_batch_size=True, num_train_epochs=3, **larger)
    plain = train(make_trainer, limited(99), number=48, num_train_epochs=3, **larger)
    sizes = [len(used) for used in model.used]
    assert sizes == [8] * 9 + [4] * 20
    # The first micro-batch of the fifth step fitted; it is the one that is used twice, and counted once.
    flat = [i for used in model.used[:8] + model.used[9:] for i in used]
    assert flat == [i for used in plain.model.used for i in used]
    assert log_of(trainer, "loss") == pytest.approx(log_of(plain, "loss"), rel=1e-6)
    for mine, theirs in zip(weights(trainer), weights(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_random_numbers_and_metrics_of_the_failed_attempt_do_not_count(make_trainer):
    class Logs(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            self.log_metric("size", float(len(inputs["x"])))
            self.log_metric("sum", inputs["x"].sum())
            return super().compute_loss(model, inputs, **kwargs)

    def run(model, **options):
        return train(make_trainer, model, trainer_class=Logs, include_num_input_tokens_seen="all", **options)

    small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    runs = []
    for options in (small, {"per_device_train_batch_size": 8, "auto_find_batch_size": True}):
        model = limited(4)
        model.main_input_name = "x"
        runs.append(run(model, **options))
    entries = [
        [{k: e.get(k) for k in ("loss", "size", "sum", "num_input_tokens_seen")} for e in t.state.log_history[:-1]]
        for t in runs
    ]
    assert entries[0] == entries[1]
    assert runs[0].state.num_input_tokens_seen == 44 * 8 * 2


class Events(TrainerCallback):
    def __init__(self):
        self.names, self.accumulation = [], set()

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.names.append("epoch")

    def on_step_begin(self, args, state, control, **kwargs):
        self.names.append("begin")

    def on_step_end(self, args, state, control, **kwargs):
        self.names.append("end")
        self.accumulation.add((args.per_device_train_batch_size, args.gradient_accumulation_steps))


def test_the_epoch_begins_once_and_the_arguments_are_put_back(make_trainer):
    events = Events()
    trainer = train(
        make_trainer,
        limited(2),
        number=16,
        auto_find_batch_size=True,
        per_device_train_batch_size=8,
        num_train_epochs=1,
        callbacks=[events],
    )
    assert events.names == ["epoch", "begin", "begin", "begin", "end", "begin", "end"]
    assert events.accumulation == {(2, 4)}
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 1)
    assert [type(callback).__name__ for callback in trainer.callback_handler.callbacks].count("MemoryRecovery") == 0


def test_random_numbers_that_callbacks_draw_when_a_step_begins_are_drawn_again(make_trainer):
    draws = on("on_step_begin", lambda **_: torch.rand(()))
    small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    larger = {"per_device_train_batch_size": 8, "auto_find_batch_size": True}
    drawn = [train(make_trainer, limited(4), callbacks=[draws], **o).model.drawn for o in (small, larger)]
    assert torch.equal(*drawn)


def test_data_without_a_length_continues_at_the_failed_step(make_trained):
    options = {"num_train_epochs": 1, "max_steps": 8, "train_dataset": Stream(numbered(44))}
    common = {"optim": "sgd", "learning_rate": 0.1, **options}
    runs = []
    for first, sizes in ((1, {"per_device_train_batch_size": 8, "auto_find_batch_size": True}), (99, {})):
        model = limited(4, first_forward=first)
        small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        trainer = make_trained(model=model, **{**common, **(sizes or small)})
        runs.append(trainer)
    assert same(*runs)
    assert runs[0].model.used == runs[1].model.used


@pytest.mark.parametrize("message", MESSAGES)
def test_what_allocators_and_libraries_say_is_understood(make_trainer, message):
    model = limited(4, error=RuntimeError(message))
    trainer = train(make_trainer, model, auto_find_batch_size=True, per_device_train_batch_size=8)
    assert trainer.state.train_batch_size == 4


def test_other_errors_are_not_taken_for_it(make_trainer):
    model = limited(4, error=RuntimeError("shapes"))
    with pytest.raises(RuntimeError, match="^shapes\n"):  # and a note of what the micro-batch held
        train(make_trainer, model, auto_find_batch_size=True, per_device_train_batch_size=8)


def test_without_the_option_running_out_of_memory_ends_the_run(make_trainer):
    with pytest.raises(torch.OutOfMemoryError):
        train(make_trainer, limited(4), per_device_train_batch_size=8)


def test_one_sample_that_does_not_fit_is_an_error_in_words(make_trainer):
    with pytest.raises(RuntimeError, match="ran out at step 0 with 1 sample .* set activation_checkpointing=True"):
        train(make_trainer, limited(0), auto_find_batch_size=True, per_device_train_batch_size=4)


def test_running_out_in_the_optimizer_is_an_error_in_words(make_trainer):
    class Greedy(torch.optim.SGD):
        def step(self, closure=None):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model = limited(99)
    optimizer = Greedy(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="ran out in the optimizer at step 0, where the micro-batch makes no differ"):
        train(make_trainer, model, auto_find_batch_size=True, optimizers=(optimizer, None))


def test_an_optimizer_that_steps_in_the_backward_is_refused(make_trainer):
    class Fused(torch.optim.SGD):
        fused_in_backward = updates_in_backward = True
        reduces_own_gradients = norm_is_estimated = False

        def nothing(self, *args, **kwargs): ...

        bind = clip_to = backward = clip_grad_norm = detach = nothing

    model = limited(99)
    optimizer = Fused(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="cannot make a step again with Fused, which changes weights during"):
        train(make_trainer, model, auto_find_batch_size=True, optimizers=(optimizer, None))


def test_a_loader_with_a_size_of_its_own_is_an_error_in_words(make_trainer):
    class Own(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=8)

    with pytest.raises(ValueError, match="get_train_dataloader returned still gives 8 samples a micro-batch"):
        train(make_trainer, limited(4), trainer_class=Own, auto_find_batch_size=True, per_device_train_batch_size=8)


@pytest.mark.parametrize("options", [{"dataloader_drop_last": True}, {"overfit_batches": 2}])
def test_options_that_count_micro_batches_are_refused(make_trainer, options):
    with pytest.raises(ValueError, match="auto_find_batch_size=True keeps the samples of every step, but"):
        make_trainer(8, auto_find_batch_size=True, **options)


def test_an_evaluation_that_runs_out_of_memory_says_what_to_lower(make_trainer):
    class Fails(Trainer):
        def prediction_step(self, *args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    options = {"eval_dataset": numbered(4), "eval_strategy": "steps", "eval_steps": 1, "auto_find_batch_size": True}
    with pytest.raises(RuntimeError, match="in an evaluation at step 1 with 8 samples .* lower per_device_eval_batch"):
        train(make_trainer, limited(99), trainer_class=Fails, **options)


def test_the_found_size_is_logged(make_trainer, heard):
    warnings = heard("warning")
    train(make_trainer, limited(4), auto_find_batch_size=True, per_device_train_batch_size=8)
    assert warnings == [
        "memory suffices for fewer than 8 samples a device and micro-batch: going on from step 0 with 4, and 2 "
        "micro-batches a step; a step has the same samples as before"
    ]


def test_what_the_failed_attempt_held_is_released_before_the_next(make_trainer):
    held, alive = [], []

    class Holds(Limited):
        def forward(self, x, labels=None, index=None):
            alive.extend(reference() is not None for reference in held)
            activations = torch.zeros(1000)
            held.append(weakref.ref(activations))
            cycle = [activations]
            cycle.append(cycle)
            return super().forward(x, labels, index)

    auto = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}
    torch.manual_seed(0)
    train(make_trainer, Holds(Classifier(), 4), number=8, **auto, num_train_epochs=1)
    assert len(held) == 3
    assert alive[0] is False
