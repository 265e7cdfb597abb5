"""Steps whose loss or gradient norm is NaN or infinite: shown, left out, or the end of the run."""

import contextlib
import copy
import json
import math
from pathlib import Path

import pytest
import torch
from support.callbacks import on
from support.data import samples
from support.models import Base, Classifier
from support.runs import ScaledDevice, log_of
from torch import nn

from tr_core import SingleDevice, Trainer, TrainerCallback
from tr_core.log_window import LogWindow

BAD = 777.0  # a feature of this value makes a micro-batch bad


class Faulty(Base):
    """Gives a loss, or gradients, that are not finite for a micro-batch with a marked sample."""

    def __init__(self, fault="nan loss"):
        super().__init__()
        self.fault = fault

    def forward(self, x, labels):
        bad = (x == BAD).any()
        loss = nn.functional.cross_entropy(self.layers(torch.where(x == BAD, 0.0, x)), labels)
        if self.fault == "nan loss":
            return {"loss": loss * torch.where(bad, math.nan, 1.0)}
        if self.fault == "infinite loss, finite gradients":
            return {"loss": loss + torch.where(bad, math.inf, 0.0)}
        # The root's slope is infinite at 0: the loss stays as it is.
        weight = self.layers[0].weight
        return {"loss": loss + (weight * torch.where(bad, 0.0, 1.0)).abs().sqrt().sum() * 1e-3}


FAULTS = ["nan loss", "infinite loss, finite gradients", "gradients only"]
OPTIMIZERS = {
    "adamw_torch_fused": {},
    "adamw_torch": {},
    "adamw_torch_fused with amsgrad": {"optim_args": "amsgrad=true"},
    "sgd": {},
    "sgd with momentum": {"optim_args": "momentum=0.9"},
    "adagrad": {},
    "rmsprop": {"optim_args": "momentum=0.9, centered=true"},
}


def rows(number, bad=()):
    """Make rows, four of them a step; the first of each step in `bad`, counted from 1, is marked."""
    made = samples(number)
    for step in bad:
        made[4 * (step - 1)]["x"] = torch.full((8,), BAD)
    return made


def faulty(fault="nan loss"):
    torch.manual_seed(0)
    return Faulty(fault)


def build(make_trainer, data, optimizer="adamw_torch_fused", **changes):
    options = {
        "train_dataset": data,
        "train_sampling_strategy": "sequential",
        "model": faulty(),
        "lr_scheduler_type": "constant",
        "learning_rate": 0.05,
        "optim": optimizer.split(" ")[0],
        **OPTIMIZERS[optimizer],
        **changes,
    }
    return make_trainer(**options)


def contents(trainer):
    """Copy the weights and the optimizer's state."""
    return copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()["state"]))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return all(map(same, one, other)) if isinstance(one, tuple) else one == other


@pytest.fixture
def lines(monkeypatch):
    """What is said through the logger, with its level."""
    lines = []
    for level in ("warning", "error"):
        say = lambda text, *args, _level=level: lines.append(f"{_level}: {text % args}")  # noqa: E731
        monkeypatch.setattr(Trainer.logger, level, say)
    return lines


# log


def test_by_default_a_loss_that_is_not_finite_is_shown_and_counted_once_a_window(make_trainer, lines):
    trainer = build(make_trainer, rows(24, bad=[3, 4]), logging_steps=2, optim="sgd")
    trainer.train()
    assert [math.isfinite(loss) for loss in log_of(trainer, "loss")] == [True, False, False]
    # The updates were applied: everything after the third step is lost.
    assert lines == [
        f"error: 2 of the 2 steps up to step {step} had a loss or a gradient norm that is NaN or infinite, and were "
        "applied; on_nonfinite='skip' leaves such updates out, on_nonfinite='raise' stops the run before they are saved"
        for step in (4, 6)
    ]


def test_a_loss_that_is_no_number_is_in_the_result_and_gone_from_the_log_of_later_steps(make_trainer):
    """The model survives it: the updates are of gradients that are 0."""

    class Survivor(Classifier):
        def forward(self, x, labels):
            outputs = super().forward(torch.where(x == BAD, 0.0, x), labels)
            if (x == BAD).any():
                outputs["loss"] = outputs["loss"].detach() * math.nan + 0.0 * outputs["loss"]
            return outputs

    trainer = build(make_trainer, rows(24, bad=[3]), model=Survivor(), num_train_epochs=2)
    assert math.isnan(trainer.train().training_loss)
    lost = [step for step, loss in enumerate(log_of(trainer, "loss"), 1) if math.isnan(loss)]
    assert lost == [3, 9]  # once an epoch
    assert all(weight.isfinite().all() for weight in trainer.model.state_dict().values())


@pytest.mark.parametrize("fault", ["infinite loss, finite gradients", "gradients only"])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_step_counts_whether_its_loss_or_its_norm_is_not_finite(make_trainer, lines, fault, filtered):
    trainer = build(
        make_trainer,
        rows(24, bad=[2, 6]),
        model=faulty(fault),
        logging_steps=6,
        learning_rate=0.0,
        logging_nan_inf_filter=filtered,
    )
    trainer.train()
    # With gradients of NaN, a learning rate of 0 does not save the weights.
    number = 2 if fault.startswith("infinite") else 5
    assert [line.split(" had")[0] for line in lines] == [f"error: {number} of the 6 steps up to step 6"]
    shows = fault.startswith("infinite") and not filtered
    assert math.isfinite(log_of(trainer, "loss")[0]) != (shows or (fault == "gradients only" and not filtered))


def test_of_a_long_window_every_step_is_counted_and_few_are_kept(make_trainer, lines, monkeypatch):
    """Steps are looked at many at a time; bad ones stand at both ends of the first such lot, and of the last."""
    kept, count = [], LogWindow.count_nonfinite

    def noting(window):
        kept.append(len(window.unchecked))
        count(window)

    monkeypatch.setattr(LogWindow, "count_nonfinite", noting)
    trainer = build(
        make_trainer,
        rows(4 * 140, bad=[1, 64, 65, 140]),
        model=faulty("infinite loss, finite gradients"),
        logging_steps=140,
        learning_rate=0.0,
    )
    trainer.train()
    assert [line.split(" had")[0] for line in lines] == ["error: 4 of the 140 steps up to step 140"]
    assert kept[:3] == [64, 64, 12]
    assert set(kept[3:]) <= {0}


def test_of_a_run_that_is_finite_nothing_is_said(make_trainer, lines):
    build(make_trainer, rows(24)).train()
    assert lines == []


def test_a_step_of_huge_numbers_is_finite(make_trainer, lines):
    class Huge(Base):
        def forward(self, x, labels):
            return {"loss": self.layers(x).sum() * 1e-6 + 3e38}

    build(make_trainer, rows(8), model=Huge()).train()
    assert lines == []


# skip


def updates(trainer):
    """Return what the events say of updates that were not made, or not by finite values."""
    events = map(json.loads, (Path(trainer.args.output_dir) / "events.jsonl").read_text().splitlines())
    known = [event for event in events if event["event"] == "updates"]
    return [{name: event[name] for name in event if name not in ("event", "time_s")} for event in known]


@pytest.mark.parametrize(("policy", "what"), [("skip", "skipped"), ("log", "nonfinite")])
def test_the_events_of_a_run_count_updates_that_were_skipped_or_not_finite(make_trainer, policy, what):
    trainer = build(make_trainer, rows(24, {3, 4}), on_nonfinite=policy, logging_steps=3, optimizer="sgd")
    trainer.model.fault = "infinite loss, finite gradients"
    trainer.train()
    assert updates(trainer) == [{"step": 3, what: 1}, {"step": 6, what: 1}]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_with_skipped_steps_is_the_run_without_their_data(make_trainer, optimizer, fault):
    bad = [1, 3, 4, 6]  # the first, two in a row, and the last
    data = rows(24, bad=bad)
    with_bad = build(make_trainer, data, optimizer, model=faulty(fault), on_nonfinite="skip")
    kept = [row for number, row in enumerate(data) if number // 4 + 1 not in bad]
    without = build(make_trainer, kept, optimizer, model=faulty(fault))
    with_bad.train()
    without.train()
    assert same(contents(with_bad), contents(without))
    losses, skipped = log_of(with_bad, "loss"), log_of(with_bad, "skipped_steps")
    assert skipped == [int(step in bad) for step in range(1, 7)]
    assert [loss for loss, left_out in zip(losses, skipped, strict=True) if not left_out] == log_of(without, "loss")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_logged_loss_is_that_of_the_steps_that_were_applied(make_trainer, lines, accumulation):
    size = 4 // accumulation
    common = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    single = build(make_trainer, rows(24, bad=[2, 5, 6]), model=faulty(), on_nonfinite="skip", **common)
    single.train()
    windows = build(
        make_trainer, rows(24, bad=[2, 5, 6]), model=faulty(), on_nonfinite="skip", logging_steps=2, **common
    )
    windows.train()
    each = log_of(single, "loss")
    assert [math.isnan(loss) for loss in each] == [False, True, False, False, True, True]
    found = log_of(windows, "loss")
    few_roundings = 10 * 2**-23  # of float32: sums of three losses, one after the other or together
    assert found[:2] == pytest.approx([each[0], (each[2] + each[3]) / 2], rel=few_roundings)
    assert math.isnan(found[2])
    finals = [trainer.state.log_history[-1]["train_loss"] for trainer in (single, windows)]
    assert finals == pytest.approx([(each[0] + each[2] + each[3]) / 3] * 2, rel=few_roundings)
    text = "of the 2 steps up to step {} were not applied (on_nonfinite='skip'): their loss or gradient norm was NaN"
    assert [line.partition(" or infinite")[0] for line in lines[-2:]] == [
        f"warning: 1 {text.format(2)}",
        f"warning: 2 {text.format(6)}",
    ]


def test_a_run_of_which_every_step_was_skipped_has_no_mean_loss(make_trainer):
    trainer = build(make_trainer, rows(8, bad=[1, 2]), on_nonfinite="skip", logging_steps=2)
    before = copy.deepcopy(trainer.model.state_dict())
    assert math.isnan(trainer.train().training_loss)
    assert same(before, trainer.model.state_dict())


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch"])
def test_the_schedule_continues_over_a_skipped_step(make_trainer, optimizer):
    """Whether a step was applied is known to the device alone; rates do not depend on the optimizer."""
    rates = []
    for bad in ([], [1], [3]):
        trainer = build(
            make_trainer,
            rows(20, bad=bad),
            optimizer,
            model=faulty(),
            on_nonfinite="skip",
            lr_scheduler_type="linear",
            warmup_steps=2,
        )
        trainer.train()
        rates.append(log_of(trainer, "learning_rate"))
    assert rates[0] == rates[1] == rates[2]
    assert len(set(rates[0])) == 5


@pytest.mark.parametrize(
    ("policy", "optimizer", "reads"),
    [
        ("skip", "adamw_torch_fused", 0),
        ("raise", "adamw_torch_fused", 0),
        ("raise", "sgd", 0),
        ("raise", "sgd with momentum", 0),
        ("skip", "sgd", 1),
        ("skip", "sgd with momentum", 1),
        ("log", "sgd", 0),
    ],
)
def test_a_step_reads_the_device_only_where_the_optimizer_cannot_skip_by_itself(
    make_trainer, read_counter, policy, optimizer, reads
):
    at_step_end = []
    note = on("on_step_end", lambda **_: at_step_end.append(len(read_counter.reads)))
    trainer = build(
        make_trainer,
        samples(64),
        optimizer,
        on_nonfinite=policy,
        callbacks=[note],
        logging_steps=1000,
        model=Classifier(),
    )
    with read_counter:
        trainer.train()
    assert len(at_step_end) == 16
    assert at_step_end[-1] - at_step_end[1] == 14 * reads


@pytest.mark.parametrize(
    ("policy", "optimizer", "expected"),
    [
        ("skip", "sgd", [False, True, False]),
        ("raise", "adamw_torch_fused", [False, True, True]),
        ("raise", "sgd with momentum", [None, None, None]),  # it leaves out none
        ("log", "sgd", [None, None, None]),
    ],
)
def test_events_are_told_on_the_device_which_updates_were_left_out(make_trainer, policy, optimizer, expected):
    told = []
    note = on("on_optimizer_step", lambda *, applied, left_out, **_: told.append((applied, left_out)))
    trainer = build(make_trainer, rows(12, bad=[2]), optimizer, on_nonfinite=policy, callbacks=[note], logging_steps=9)
    with contextlib.suppress(FloatingPointError):
        trainer.train()
    assert [applied for applied, _ in told] == [True] * 3
    assert [None if left_out is None else bool(left_out) for _, left_out in told] == expected


def test_fused_sgd_with_momentum_has_its_flag_read():
    """torch gives its buffers uninitialised memory in a first step that is left out on the device."""
    from tr_core.optim.nonfinite import skips_on_device, step_unless

    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    assert not skips_on_device(optimizer)
    assert skips_on_device(torch.optim.SGD([weight], lr=0.1, fused=True))
    weight.grad = torch.full((3,), math.nan)
    step_unless(torch.tensor(True), optimizer)
    assert (weight.tolist(), dict(optimizer.state)) == ([1.0] * 3, {})


def test_an_optimizer_that_asks_the_scaler_itself_has_its_flag_read():
    from tr_core.optim.nonfinite import skips_on_device

    class Asks(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            return super().step(closure)

    assert not skips_on_device(Asks([nn.Parameter(torch.ones(1))], lr=0.1))


# raise


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_raise_ends_the_run_at_the_next_log(make_trainer, optimizer, fault):
    ended, weights = [], {}

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            weights[state.global_step] = copy.deepcopy(trainer.model.state_dict())

        def on_train_end(self, args, state, control, error=None, **kwargs):
            ended.append((state.global_step, error))

    trainer = build(
        make_trainer,
        rows(32, bad=[3]),
        optimizer,
        model=faulty(fault),
        on_nonfinite="raise",
        callbacks=[Look()],
        logging_steps=4,
    )
    with pytest.raises(FloatingPointError, match="^step 3: the loss is ") as caught:
        trainer.train()
    assert ended == [(4, caught.value)]
    assert log_of(trainer, "loss") == []
    message = str(caught.value)
    keeps = optimizer.startswith("adamw_torch_fused")
    if keeps:
        assert "left out: the weights are those of step 2; no checkpoint was saved since" in message
        assert same(trainer.model.state_dict(), weights[2])
    else:
        name = type(trainer.optimizer).__name__
        assert f"{name} cannot leave out an update without waiting for the device in every step" in message
    shown = {
        "nan loss": "the loss is nan, the gradient norm nan; gradients that are not finite: layers.0.weight, "
        "layers.0.bias, layers.3.weight, layers.3.bias. ",
        "infinite loss, finite gradients": "gradients that are not finite: none of the parameters that hold one. ",
        "gradients only": "gradients that are not finite: layers.0.weight. ",
    }
    assert shown[fault] in message
    assert "on_nonfinite='skip'" in message
    assert "torch.autograd.set_detect_anomaly(True)" in message


def test_many_gradients_that_are_not_finite_are_counted(make_trainer):
    class Deep(Faulty):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])

    with pytest.raises(FloatingPointError, match=r"layers.1.bias, layers.2.weight and 5 more\. "):
        build(make_trainer, rows(8, bad=[1]), model=Deep(), on_nonfinite="raise").train()


def test_a_parameter_without_a_gradient_does_not_disturb(make_trainer):
    model = faulty("gradients only")
    model.unused = nn.Linear(2, 2)
    with pytest.raises(FloatingPointError, match=r"not finite: layers\.0\.weight\. "):
        build(make_trainer, rows(8, bad=[1]), model=model, on_nonfinite="raise").train()


@pytest.mark.parametrize("due", ["evaluation", "end"])
def test_raise_comes_before_an_evaluation_and_before_the_end(make_trainer, due):
    events = []
    look = [
        on("on_step_end", lambda state, **_: events.append(state.global_step)),
        on("on_evaluate", lambda **_: events.append("evaluated")),
    ]
    changes = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": samples(4)} if due == "evaluation" else {}
    trainer = build(
        make_trainer, rows(32, bad=[3]), on_nonfinite="raise", callbacks=look, logging_strategy="no", **changes
    )
    with pytest.raises(FloatingPointError, match="^step 3: "):
        trainer.train()
    assert events == ([1, 2, "evaluated", 3, 4] if due == "evaluation" else [1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_run_that_is_finite_is_the_same_bit_for_bit(make_trainer, policy):
    runs = []
    for on_nonfinite in ("log", policy):
        trainer = build(
            make_trainer, rows(40), model=faulty(), on_nonfinite=on_nonfinite, gradient_accumulation_steps=2
        )
        trainer.train()
        runs.append((trainer, log_of(trainer, "loss")))
    assert same(contents(runs[0][0]), contents(runs[1][0]))
    assert runs[0][1] == runs[1][1]


# float16


def with_scaler(trainer):
    trainer.strategy = ScaledDevice()
    return trainer


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch", "sgd with momentum"])
@pytest.mark.parametrize("fault", FAULTS)
def test_under_float16_a_skipped_step_changes_nothing_either(make_trainer, optimizer, fault):
    data = rows(20, bad=[1, 3])
    trainer = with_scaler(build(make_trainer, data, optimizer, model=faulty(fault), on_nonfinite="skip"))
    trainer.train()
    kept = [row for number, row in enumerate(data) if number // 4 + 1 not in (1, 3)]
    without = with_scaler(build(make_trainer, kept, optimizer, model=faulty(fault)))
    without.train()
    assert same(contents(trainer), contents(without))
    skipped = log_of(trainer, "skipped_steps")
    assert skipped == [1, 0, 1, 0, 0]


@pytest.mark.parametrize(("optimizer", "reads"), [("adamw_torch_fused", 2), ("sgd", 3)])
def test_under_float16_a_step_reads_the_scale_and_whether_gradients_are_finite(
    make_trainer, read_counter, optimizer, reads
):
    at_step_end = []
    note = on("on_step_end", lambda **_: at_step_end.append(len(read_counter.reads)))
    trainer = with_scaler(build(make_trainer, rows(64), optimizer, callbacks=[note], logging_steps=1000))
    with read_counter:
        trainer.train()
    assert at_step_end[-1] - at_step_end[1] == reads * (len(at_step_end) - 2)


def test_under_float16_an_overflow_is_no_reason_to_raise_and_is_not_logged(make_trainer, lines):
    for policy in ("log", "raise"):
        trainer = with_scaler(
            build(make_trainer, rows(20, bad=[2]), model=faulty("gradients only"), on_nonfinite=policy)
        )
        trainer.train()
        assert trainer.state.global_step == 5
        assert updates(trainer) == [{"step": 2, "overflowed": 1}]
        assert all(map(math.isfinite, log_of(trainer, "loss")))
    assert lines == []


def test_under_float16_a_loss_that_is_not_finite_is_logged_or_raised(make_trainer, lines):
    with_scaler(build(make_trainer, rows(20, bad=[2]), model=faulty(), logging_steps=5)).train()
    assert lines == [
        "error: some of the 5 steps up to step 5 had a loss that is NaN or infinite; float16 left their updates out"
    ]
    with pytest.raises(FloatingPointError, match=r"^step 2: the loss is nan.*the weights are those of step 1;"):
        with_scaler(build(make_trainer, rows(20, bad=[2]), model=faulty(), on_nonfinite="raise")).train()


@pytest.mark.cuda
@pytest.mark.parametrize("policy", ["log", "skip", "raise"])
def test_on_a_cuda_device_no_step_waits_for_it_and_a_bad_one_is_left_out(make_trainer, no_sync, policy):
    bad = [] if policy == "log" else [7]
    logs = on("on_step_end", lambda **_: trainer.log_metric("one", torch.ones((), device="cuda"), weight=2.0))
    options = {"callbacks": [logs, no_sync], "logging_strategy": "epoch", "use_cpu": False}
    trainer = build(make_trainer, rows(80, bad=bad), on_nonfinite=policy, **options)
    if policy == "raise":
        with pytest.raises(FloatingPointError, match="^step 7: .*the weights are those of step 6;"):
            trainer.train()
    else:
        trainer.train()
        assert trainer.state.log_history[0].get("skipped_steps", 0) == len(bad)
        assert trainer.state.log_history[0]["one"] == 1.0
    assert all(weight.isfinite().all() for weight in trainer.model.state_dict().values())


# What cannot be skipped


def test_an_optimizer_that_updates_in_the_backward_cannot_skip(make_trainer, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.fused_in_backward = True
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ValueError, match="on_nonfinite='skip' cannot leave out an update of SGD: it is made"):
        make_trainer(4, on_nonfinite="skip", optimizers=(optimizer, schedule)).train()


def test_a_strategy_that_cannot_skip_is_named(make_trainer):
    class Old(SingleDevice):
        def step(self, optimizer):
            optimizer.step()
            return True

    trainer = build(make_trainer, rows(8), on_nonfinite="skip")
    trainer.strategy = Old("cpu")
    with pytest.raises(ValueError, match=r"needs a strategy whose step\(optimizer, skip=...\).* that of Old cannot"):
        trainer.train()
    trainer = build(make_trainer, rows(8, bad=[1]), on_nonfinite="raise")
    trainer.strategy = Old("cpu")
    with pytest.raises(FloatingPointError, match="AdamW cannot leave out an update"):
        trainer.train()
