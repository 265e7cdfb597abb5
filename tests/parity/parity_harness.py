"""Run one scenario through both trainers, and compare everything that can be seen of the two runs."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from parity_recorder import BatchRecorder, Recorder
from torch import nn

import tr_core

# What is different in every run.
_TIMES = ("_runtime", "_per_second", "_model_preparation_time")

# The reference averages a float32 array of every sample's loss; here sums are float64. The two roundings are at most
# a few units in float32's last place apart (6e-8).
EVAL_LOSS_TOLERANCE = 3e-7


@dataclass(frozen=True)
class Side:
    """One of the two trainers.

    Attributes:
        name: `reference` or `ours`.
        trainer: its Trainer class.
        arguments: its TrainingArguments class.
        callback: its base class of callbacks.
        early_stopping: its callback that stops early.
    """

    name: str
    trainer: Any
    arguments: Any
    callback: Any
    early_stopping: Any


def _side(name: str, module: Any) -> Side:
    return Side(name, module.Trainer, module.TrainingArguments, module.TrainerCallback, module.EarlyStoppingCallback)


REFERENCE, OURS = _side("reference", transformers), _side("ours", tr_core)


@dataclass
class Scenario:
    """A run that both trainers can make.

    Attributes:
        model: makes the model; called for each side, with torch's generator seeded alike.
        train: the training data, or a function that makes it for each side.
        evaluation: the evaluation data, likewise.
        arguments: training arguments beside the common ones (see `arguments_of`).
        options: further arguments of the Trainer.
        callbacks: makes the callbacks; they must suit both sides.
        subclass: makes, of a Trainer class, the subclass to use.
    """

    model: Callable[[], nn.Module]
    train: Any = None
    evaluation: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], Iterable[Any]] = tuple
    subclass: Callable[[Any], Any] = lambda trainer: trainer


@dataclass
class Outcome:
    """What one side made of a scenario."""

    side: Side
    folder: Path
    trainer: Any
    recorder: Recorder
    batches: BatchRecorder
    output: Any = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The log entries without times."""
        return [without_times(entry) for entry in self.trainer.state.log_history]

    @property
    def losses(self) -> list[float]:
        """The training losses that were logged."""
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's state."""
        return self.trainer.model.state_dict()


def make_model(scenario: Scenario) -> nn.Module:
    """Make a scenario's model, the same every time."""
    torch.manual_seed(0)
    return scenario.model()


def arguments_of(side: Side, scenario: Scenario, folder: Path) -> Any:
    """Make the training arguments: on the CPU, every step logged, nothing saved, unless they say otherwise."""
    common = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
    }
    return side.arguments(**{**common, **scenario.arguments})


def build(side: Side, scenario: Scenario, folder: Path, model: nn.Module | None = None) -> Outcome:
    """Build one side's Trainer for a scenario.

    Args:
        side: which of the two.
        scenario: what to build.
        folder: where it writes.
        model: the model to train as it is; None makes the scenario's.
    """
    model = make_model(scenario) if model is None else model
    recorder, batches = Recorder(), BatchRecorder(model)
    with warnings_of(side):
        trainer = scenario.subclass(side.trainer)(
            model=model,
            args=arguments_of(side, scenario, folder),
            train_dataset=_made(scenario.train),
            eval_dataset=_made(scenario.evaluation),
            callbacks=[*scenario.callbacks(), recorder],
            **scenario.options,
        )
    if side is REFERENCE:
        # It takes total_flos out of the dict that becomes the result.
        trainer.remove_callback(transformers.PrinterCallback)
    return Outcome(side, folder, trainer, recorder, batches)


def run(side: Side, scenario: Scenario, folder: Path, **how: Any) -> Outcome:
    """Build one side's Trainer and train; `how` goes to `train`."""
    outcome = build(side, scenario, folder)
    with warnings_of(side):
        outcome.output = outcome.trainer.train(**how)
    return outcome


def run_both(scenario: Scenario, folder: Path) -> tuple[Outcome, Outcome]:
    """Train with the reference and with ours, each in a folder of its own."""
    return run(REFERENCE, scenario, folder / "reference"), run(OURS, scenario, folder / "ours")


@contextmanager
def warnings_of(side: Side) -> Iterator[None]:
    """Let warnings of the reference pass; those of ours are errors, as everywhere."""
    with warnings.catch_warnings():
        if side is REFERENCE:
            warnings.simplefilter("ignore")
        yield


def assert_same(reference: Outcome, ours: Outcome, but: Iterable[str] = ()) -> None:
    """Compare two runs: data, events, logs, counts, state, result, weights and optimizer, bit for bit.

    Only the means of evaluation losses have a tolerance: see EVAL_LOSS_TOLERANCE.

    Args:
        reference: the reference's run.
        ours: ours.
        but: which of CHECKS are left out; the test says why.
    """
    unknown = set(but) - set(CHECKS)
    assert not unknown, f"no such checks: {unknown}"
    for name, check in CHECKS.items():
        if name not in but:
            check(reference, ours)


def _same_batches(reference: Outcome, ours: Outcome) -> None:
    for theirs, mine in ((reference.batches.train, ours.batches.train), (reference.batches.eval, ours.batches.eval)):
        assert len(mine) == len(theirs)
        for number, (expected, batch) in enumerate(zip(theirs, mine, strict=True)):
            assert same_tensors(expected, batch), f"forward {number}: {expected} {batch}"


def _same_events(reference: Outcome, ours: Outcome) -> None:
    assert ours.recorder.events == reference.recorder.events
    for name in ("logs", "metrics"):  # what on_log and on_evaluate were given
        pairs = zip(getattr(reference.recorder, name), getattr(ours.recorder, name), strict=True)
        for expected, given in pairs:
            assert_same_metrics(without_times(expected), without_times(given))


def _same_history(reference: Outcome, ours: Outcome) -> None:
    expected, history = reference.history, ours.history
    assert [set(entry) for entry in history] == [set(entry) for entry in expected]
    for entry, other in zip(expected, history, strict=True):
        assert_same_metrics(entry, other)
    if reference.output is not None:
        assert ours.output.global_step == reference.output.global_step
        assert is_same_value(reference.output.training_loss, ours.output.training_loss)
        assert set(ours.output.metrics) == set(reference.output.metrics)
        assert_same_metrics(without_times(reference.output.metrics), without_times(ours.output.metrics))


def assert_same_metrics(expected: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Compare two dicts of metrics, exactly but for evaluation losses."""
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        is_mean_over_samples = name.endswith("_loss") and name != "train_loss"
        tolerance = EVAL_LOSS_TOLERANCE if is_mean_over_samples else 0.0
        same = is_same_value(value, metrics[name], tolerance)
        assert same, f"{name}: {metrics[name]!r} instead of {value!r} in {expected}"


def _same_rates(reference: Outcome, ours: Outcome) -> None:
    """Compare how many samples were counted for each step; times differ, and speeds are rounded to three places."""
    histories = (reference.trainer.state.log_history, ours.trainer.state.log_history)
    for expected, entry in zip(*histories, strict=True):
        for name in [name for name in expected if name.endswith("_samples_per_second")]:
            steps = name.replace("_samples_", "_steps_")
            ratio, other = (values[name] / max(values[steps], 1e-9) for values in (expected, entry))
            assert math.isclose(other, ratio, rel_tol=0.01), f"{other} samples a step instead of {ratio} in {name}"


def is_same_value(expected: Any, value: Any, tolerance: float = 0.0) -> bool:
    """Whether two logged values are equal, NaN to NaN included, or as near as `tolerance` says."""
    if isinstance(expected, float) and isinstance(value, float):
        both_nan = math.isnan(expected) and math.isnan(value)
        return both_nan or math.isclose(expected, value, rel_tol=tolerance)
    return expected == value


def _same_state(reference: Outcome, ours: Outcome) -> None:
    names = (
        "epoch",
        "global_step",
        "max_steps",
        "logging_steps",
        "save_steps",
        "train_batch_size",
        "num_train_epochs",
        "num_input_tokens_seen",
        "total_flos",
        "is_local_process_zero",
        "is_world_process_zero",
        "is_hyper_param_search",
    )
    state, expected = ours.trainer.state, reference.trainer.state
    if reference.trainer.args.eval_strategy == "steps":
        names += ("eval_steps",)
    if reference.trainer.args.save_strategy != "no":  # else the reference does not note it
        names += ("best_global_step",)
    assert {n: getattr(state, n) for n in names} == {n: getattr(expected, n) for n in names}
    assert is_same_value(expected.best_metric, state.best_metric, EVAL_LOSS_TOLERANCE)


def _same_weights(reference: Outcome, ours: Outcome) -> None:
    assert same_tensors(reference.weights, ours.weights)


def _same_optimizer(reference: Outcome, ours: Outcome) -> None:
    expected, state = reference.trainer.optimizer.state_dict(), ours.trainer.optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert same_tensors(values, state["state"][number])


CHECKS: dict[str, Callable[[Outcome, Outcome], None]] = {
    "batches": _same_batches,
    "events": _same_events,
    "history": _same_history,
    "rates": _same_rates,
    "state": _same_state,
    "weights": _same_weights,
    "optimizer": _same_optimizer,
}


def same_tensors(expected: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether two dicts hold the same keys and bitwise the same tensors (NaN is like NaN)."""
    return expected.keys() == others.keys() and all(_same_bits(value, others[key]) for key, value in expected.items())


def _same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return a == b
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and bool(((a == b) | ((a != a) & (b != b))).all())


def without_times(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics without run times and throughputs."""
    return {name: value for name, value in metrics.items() if not name.endswith(_TIMES)}


def _made(data: Any) -> Any:
    return data() if callable(data) else copy.deepcopy(data)
