"""Metrics that a run logs of itself: averaged over the window between two logs, on the device."""

import gc
import math
import weakref

import pytest
import torch
from support.data import samples
from support.models import Classifier, CountedSum
from support.runs import log_of
from torch import nn

from tr_core import SingleDevice, Trainer, TrainerCallback
from tr_core.metric_means import RESERVED_NAMES, MetricWindow, accumulator_dtype, read_scalars, weighted_means


class Every(TrainerCallback):
    """Calls a function at an event, with the Trainer and the step."""

    def __init__(self, event, function):
        self.trainer, self.seen = None, 0

        def call(args, state, control, **kwargs):
            self.seen += 1
            function(self.trainer, self.seen)

        setattr(self, event, call)


def run(make_trainer, event, function, number=32, **changes):
    callback = Every(event, function)
    trainer = callback.trainer = make_trainer(number, callbacks=[callback], **changes)
    trainer.train()
    return trainer


# What is averaged, over what


@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
def test_a_metric_is_averaged_over_the_steps_since_the_last_log(make_trainer, as_tensor):
    def log(trainer, number):
        trainer.log_metric("squares", torch.tensor(float(number**2)) if as_tensor else number**2)

    trainer = run(make_trainer, "on_step_end", log, logging_steps=4)  # 8 steps
    assert log_of(trainer, "squares") == [(1 + 4 + 9 + 16) / 4, (25 + 36 + 49 + 64) / 4]
    entry = trainer.state.log_history[0]
    assert set(entry) == {"loss", "grad_norm", "learning_rate", "squares", "epoch", "step"}


def test_values_count_by_their_weights(make_trainer):
    def log(trainer, number):
        trainer.log_metric("floats", float(number), weight=number)
        trainer.log_metric("tensors", torch.tensor(float(number)), weight=torch.tensor(number))
        trainer.log_metric("mixed", float(number), weight=torch.tensor(number))
        trainer.log_metric("sparse", float(number), weight=float(number == 2))
        trainer.log_metric("weightless", float(number), weight=0.0)
        trainer.log_metric("weightless on the device", float(number), weight=torch.tensor(0))

    trainer = run(make_trainer, "on_step_end", log, number=16, logging_steps=4)
    mean = (1 + 4 + 9 + 16) / (1 + 2 + 3 + 4)
    entry = trainer.state.log_history[0]
    assert (entry["floats"], entry["tensors"], entry["mixed"], entry["sparse"]) == (mean, mean, mean, 2.0)
    assert not any(name.startswith("weightless") for name in entry)


def in_inference_mode(number):
    with torch.inference_mode(number % 2 == 1):
        return torch.full((1,), float(number))


@pytest.mark.parametrize(
    "value", [lambda number: number if number % 2 else torch.tensor(number, dtype=torch.int32), in_inference_mode]
)
def test_values_of_several_kinds_of_one_name_make_one_mean(make_trainer, value):
    def log(trainer, number):
        trainer.log_metric("value", value(number))

    assert log_of(run(make_trainer, "on_step_end", log, number=16, logging_steps=4), "value") == [2.5]


def test_a_product_of_a_value_in_16_bits_and_its_weight_is_not_rounded_to_them(make_trainer):
    value = torch.tensor(1.0078125, dtype=torch.bfloat16)

    def log(trainer, number):
        trainer.log_metric("value", value, weight=3.0)

    assert log_of(run(make_trainer, "on_step_end", log, number=4), "value") == [value.item()]


def test_a_value_that_is_not_a_number_shows_and_is_gone_with_its_window(make_trainer):
    def log(trainer, number):
        trainer.log_metric("value", torch.tensor(math.nan if number == 1 else 1.0))

    values = log_of(run(make_trainer, "on_step_end", log, number=16, logging_steps=2), "value")
    assert math.isnan(values[0])
    assert values[1] == 1.0


class LogsAccuracy(Trainer):
    """Logs a metric of each batch from `compute_loss`, with a graph behind it."""

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        logits = outputs["logits"]
        self.log_metric("accuracy", (logits.argmax(-1) == inputs["labels"]).float().mean(), len(logits))
        self.log_metric("logit", logits.mean(), len(logits))
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def expected_means(model, rows, change_weights):
    """Compute by hand what LogsAccuracy logs of a run of which every step has all rows; two logs of two steps."""
    x, labels = torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows])
    steps = []
    for step in range(4):
        change_weights(step)
        logits = model(x)["logits"].detach()
        steps.append(((logits.argmax(-1) == labels).double().mean().item(), logits.double().mean().item()))
    return [[(a + b) / 2 for a, b in zip(*steps[n : n + 2], strict=True)] for n in (0, 2)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_metric_of_compute_loss_is_the_mean_over_all_micro_batches(make_trainer, accumulation):
    """Six rows a step, in one micro-batch or in three."""
    torch.manual_seed(0)
    model, twin = Classifier(), Classifier()
    twin.load_state_dict(model.state_dict())
    weights = []
    trainer = run(
        make_trainer,
        "on_step_begin",
        lambda trainer, number: weights.append({k: v.clone() for k, v in trainer.model.state_dict().items()}),
        number=6,
        trainer_class=LogsAccuracy,
        model=model,
        per_device_train_batch_size=6 // accumulation,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=4,
        logging_steps=2,
        learning_rate=0.05,
    )
    means = expected_means(twin, samples(6), lambda step: twin.load_state_dict(weights[step]))
    assert log_of(trainer, "accuracy") == pytest.approx([mean[0] for mean in means], abs=1e-7)
    assert log_of(trainer, "logit") == pytest.approx([mean[1] for mean in means], abs=1e-7)
    assert means[0] != means[1]


def test_nothing_is_kept_of_the_graph_behind_a_value(make_trainer):
    leaves, alive = [], []

    def log(trainer, number):
        gc.collect()
        alive.append([leaf() is not None for leaf in leaves])
        leaf = torch.ones((), requires_grad=True)
        leaves.append(weakref.ref(leaf))
        trainer.log_metric("value", leaf * number)

    run(make_trainer, "on_step_end", log, number=12, logging_steps=3)
    assert alive == [[], [False], [False, False]]


# What it costs


def test_nothing_is_read_from_the_device_until_a_log(make_trainer, read_counter):
    reads = []

    def log(trainer, number):
        reads.append(len(read_counter.reads))
        trainer.log_metric("value", torch.tensor(1.0), weight=torch.tensor(2.0))
        trainer.log_metric("other", torch.tensor(1.0))

    with read_counter:
        run(make_trainer, "on_step_end", log, number=80, logging_steps=1000)
    assert len(reads) == 20
    assert reads[-1] == reads[2]


@pytest.mark.parametrize(("names", "reads"), [(0, 1), (1, 2), (5, 2)])
def test_a_log_reads_the_device_once_and_all_metrics_with_one_read_more(make_trainer, read_counter, names, reads):
    before, after = [], []

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            for number in range(names):
                trainer.log_metric(f"metric {number}", torch.tensor(1.0))
            before.append(len(read_counter.reads))

        def on_log(self, args, state, control, logs, **kwargs):
            after.append(len(read_counter.reads))

    trainer = make_trainer(40, callbacks=[Note()], logging_steps=1)
    with read_counter:
        trainer.train()
    assert [end - begin for begin, end in zip(before, after, strict=False)] == [reads] * 10


# Within an evaluation


def test_in_an_evaluation_a_metric_is_averaged_over_it_and_gets_its_prefix(make_trained):
    trainer = make_trained(
        8,
        trainer_class=LogsAccuracy,
        eval_dataset=samples(10, seed=1),
        per_device_eval_batch_size=4,
        eval_strategy="epoch",
        logging_steps=1,
        compute_metrics=lambda p: {"true_accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
    )
    alone = trainer.evaluate(metric_key_prefix="final")
    (evaluated,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated["eval_accuracy"] == pytest.approx(evaluated["eval_true_accuracy"], abs=1e-9)
    assert alone["final_accuracy"] == pytest.approx(evaluated["eval_accuracy"], abs=1e-9)
    # The evaluation between them changed nothing in the windows of the training.
    assert len(log_of(trainer, "accuracy")) == 2


def test_an_evaluation_in_the_middle_of_a_window_does_not_touch_it(make_trainer):
    def values(**changes):
        trainer = make_trainer(16, trainer_class=LogsAccuracy, logging_steps=4, **changes)
        trainer.train()
        return log_of(trainer, "accuracy"), log_of(trainer, "logit")

    evaluating = {"eval_dataset": samples(6, seed=2), "eval_strategy": "steps", "eval_steps": 1}
    torch.manual_seed(0)
    first = values(model=Classifier())
    torch.manual_seed(0)
    assert values(model=Classifier(), **evaluating) == first


def test_a_metric_of_compute_metrics_comes_before_one_that_was_logged(make_trainer):
    trainer = make_trainer(
        4, trainer_class=LogsAccuracy, eval_dataset=samples(4), compute_metrics=lambda p: {"accuracy": 7.0}
    )
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == 7.0
    assert "eval_logit" in metrics


def test_predict_averages_too(make_trainer):
    trainer = make_trainer(4, trainer_class=LogsAccuracy)
    assert {"test_accuracy", "test_logit"} <= set(trainer.predict(samples(6)).metrics)


# A dict from compute_loss


class Parts(Trainer):
    """Returns a loss of two parts."""

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        ce, size = outputs["loss"], outputs["logits"].square().mean()
        parts = {"loss": ce + 0.1 * size, "ce": ce, "scaled_size": 0.1 * size, "constant": 3}
        return (parts, outputs) if return_outputs else parts


class CountedParts(Trainer):
    """The same for a loss that is divided by the count of the whole step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        ce = outputs["loss"]
        parts = {"loss": ce * 1.5, "ce": ce, "scaled_size": ce * 0.5}
        return (parts, outputs) if return_outputs else parts


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize(("trainer_class", "model_class"), [(Parts, Classifier), (CountedParts, CountedSum)])
def test_the_parts_of_a_loss_add_up_in_the_log(make_trained, accumulation, trainer_class, model_class):
    """Also where the last step of an epoch has fewer micro-batches, and a loss is a share of its step's."""
    torch.manual_seed(0)
    trainer = make_trained(
        22,
        trainer_class=trainer_class,
        model=model_class(),
        gradient_accumulation_steps=accumulation,
        logging_steps=2,
        eval_dataset=samples(9),
        learning_rate=0.05,
    )
    assert len(log_of(trainer, "ce")) >= 1
    for entry in trainer.state.log_history:
        if "loss" in entry:
            assert entry["ce"] + entry["scaled_size"] == pytest.approx(entry["loss"], rel=1e-6)
    metrics = trainer.evaluate()
    assert metrics["eval_ce"] + metrics["eval_scaled_size"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_a_dict_trains_as_its_loss_does(make_trained):
    class Sum(Parts):
        def compute_loss(self, model, inputs, return_outputs=False):
            return super().compute_loss(model, inputs)["loss"]

    torch.manual_seed(0)
    one, other = Classifier(), Classifier()
    other.load_state_dict(one.state_dict())
    losses = []
    for trainer_class, model in ((Parts, one), (Sum, other)):
        trainer = make_trained(20, trainer_class=trainer_class, model=model, gradient_accumulation_steps=2)
        losses.append(log_of(trainer, "loss"))
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ({"loss": "t", "logits": torch.ones(4, 3)}, ValueError, r"entry 'logits' is of shape \(4, 3\); entries beside"),
        ({"loss": "t", "name": "ce"}, ValueError, "entry 'name' is a str"),
        ({"ce": "t"}, ValueError, r"a dict without a tensor 'loss', only \['ce'\]"),
        ({"loss": "t", "learning_rate": 0.1}, ValueError, "'learning_rate' cannot be the name of a metric"),
        (("t", {}), TypeError, "compute_loss returned a tuple; it returns a scalar tensor, or a dict of scalars"),
    ],
)
def test_what_compute_loss_may_not_return_is_said(make_trainer, returned, error, message):
    class Returns(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            loss = model(**inputs)["loss"]
            if isinstance(returned, tuple):
                return (loss, {})
            return {name: loss if value == "t" else value for name, value in returned.items()}

    with pytest.raises(error, match=message):
        make_trainer(8, trainer_class=Returns).train()


def test_a_model_that_returns_a_dict_is_no_dict_of_metrics(make_trained):
    class Extra(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Classifier()

        def forward(self, x, labels=None):
            return {**self.inner(x, labels), "hidden": x.mean()}

    trainer = make_trained(4, model=Extra())
    assert not log_of(trainer, "hidden")


@pytest.mark.parametrize("bad", [1, 2])
def test_parts_of_a_skipped_step_do_not_count(make_trained, bad):
    class Breaks(Parts):
        def compute_loss(self, model, inputs, return_outputs=False):
            parts = super().compute_loss(model, inputs)
            factor = math.nan if self.state.global_step + 1 == bad else 1.0
            return {name: value * factor for name, value in parts.items()}

    trainer = make_trained(
        12, trainer_class=Breaks, on_nonfinite="skip", per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    entries = trainer.state.log_history
    assert [entry.get("skipped_steps") for entry in entries[:3]] == [int(bad == step) for step in (1, 2, 3)]
    for step, entry in enumerate(entries[:3], start=1):
        assert ("ce" in entry) == (step != bad)
        if step != bad:
            assert entry["ce"] + entry["scaled_size"] == pytest.approx(entry["loss"], rel=1e-6)


# What is refused


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_a_name_that_an_entry_has_already_is_refused(make_trainer, name):
    with pytest.raises(ValueError, match=rf"'{name}' cannot be the name of a metric: entries of the log have"):
        run(make_trainer, "on_step_end", lambda trainer, number: trainer.log_metric(name, 1.0), number=4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("", 1.0), ValueError, "the name of a metric is a text, not ''"),
        ((3, 1.0), ValueError, "the name of a metric is a text, not 3"),
        (("a", torch.ones(2)), ValueError, r"log_metric\('a'\) was given a value of shape \(2,\); it needs a number"),
        (("a", "b"), TypeError, r"log_metric\('a'\) was given value='b'; it needs a number"),
        (("a", None), TypeError, r"log_metric\('a'\) was given value=None"),
        (("a", 1.0, -1), ValueError, r"given weight=-1; a weight is finite and not negative"),
        (("a", 1.0, math.inf), ValueError, r"given weight=inf; a weight is finite"),
        (("a", 1.0, torch.ones(3)), ValueError, r"was given a weight of shape \(3,\)"),
    ],
)
def test_what_cannot_be_logged_is_refused(make_trainer, arguments, error, message):
    with pytest.raises(error, match=message):
        run(make_trainer, "on_step_end", lambda trainer, number: trainer.log_metric(*arguments), number=4)


def test_outside_training_and_evaluation_there_is_nothing_to_average_over(make_trainer):
    trainer = make_trainer(4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"log_metric\('a'\) has nothing to average over: neither training nor"):
            trainer.log_metric("a", 1.0)
        trainer.train()


# The window by itself


def test_a_window_that_was_read_and_loaded_continues_as_it_would_have():
    device = SingleDevice("cpu")
    whole, first, second = MetricWindow(device), MetricWindow(device), MetricWindow(device)
    for number in range(6):
        for window in (whole, first if number < 3 else second):
            window.add("value", torch.tensor(0.1 * number), weight=1.0 + number)
            window.add("other", 0.1 * number)
        if number == 2:
            second.load(first.read())
    assert second.means() == pytest.approx(whole.means(), rel=1e-15)
    second.clear()
    assert second.means() == {}


def test_ranks_that_hold_different_names_or_none_make_one_mean():
    ranks = [{"a": (6.0, 2.0), "b": (1.0, 1.0)}, {}, {"a": (3.0, 1.0), "c": (5.0, 2.0)}, {"d": (0.0, 0.0)}]
    assert weighted_means(ranks) == {"a": 3.0, "b": 1.0, "c": 2.5}


def test_scalars_of_any_shape_and_type_are_read_as_they_are():
    assert read_scalars([]) == []
    assert read_scalars([torch.tensor(0.5)]) == [0.5]
    mixed = [torch.tensor([[2.5]]), torch.tensor(2**53), torch.tensor(True), torch.tensor(0.1, requires_grad=True)]
    assert read_scalars(mixed) == [2.5, 2.0**53, 1.0, float(torch.tensor(0.1))]


def test_sums_are_kept_in_64_bits_where_the_device_has_them():
    assert accumulator_dtype(torch.device("cpu")) == torch.float64
    assert accumulator_dtype(torch.device("mps")) == torch.float32
