"""Captured steps: the bits of ordinary ones, whatever changes meanwhile, and words where a step cannot be captured."""

import copy
import itertools
import logging
import random
import re
import warnings

import pytest
import torch
from support.callbacks import Stop, StopAt
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Base, Classifier, CountedSum, IgnoresCount, ReturnsTuple
from support.runs import TORCH
from torch import nn
from torch.torch_version import TorchVersion

from tr_core import Trainer, TrainerCallback
from tr_core.capture import running
from tr_core.capture.values import NotCapturableError


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch, request):
    """Captures run one operation after the other, which gives the bits of the ordinary step."""
    if "with_compiler" not in request.fixturenames:
        monkeypatch.setattr(running, "cpp_compiler", lambda: None)


@pytest.fixture
def with_compiler():
    if running.cpp_compiler() is None:
        pytest.skip("needs a C++ compiler")
    if TORCH < (2, 7):
        pytest.skip("needs torch 2.7, whose inductor draws the random numbers of the ordinary step")


@pytest.fixture
def both(make_trainer, caplog):
    """Train a model by ordinary steps, and again by captured ones; return both Trainers."""

    def train(model=None, number=44, callbacks=None, between=None, mode="auto", **options):
        model = Classifier(dropout=0.3) if model is None else model
        trainers = []
        for step_compile in ("off", mode):
            torch.manual_seed(1)
            parts = {name: make() if name == "optimizers" else make for name, make in options.items()}
            trainer = make_trainer(
                number,
                model=copy.deepcopy(model),
                callbacks=[make() for make in callbacks or ()],
                step_compile=step_compile,
                **{"num_train_epochs": 2, "log_level": "info", **parts},
            )
            if between is not None:
                between(trainer)
            with caplog.at_level(logging.INFO), Captured(trainer) as captured:
                trainer.train()
            trainer.num_captured = captured.number
            trainers.append(trainer)
        return trainers

    return train


class Captured:
    """Counts the micro-batches that captures ran in a run."""

    def __init__(self, trainer):
        self.trainer, self.number = trainer, 0
        trainer.add_callback(self)

    def on_train_end(self, args, state, control, **kwargs):
        run = self.trainer.current_run
        self.number = 0 if run is None or run.capture is None else run.capture.num_captured

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.trainer.pop_callback(self)


def values(trainer):
    return [*trainer.model.state_dict().values(), *optimizer_state(trainer)]


def optimizer_state(trainer):
    state = trainer.optimizer.state_dict()["state"]
    return [value for of in state.values() for value in of.values() if isinstance(value, torch.Tensor)]


def assert_same(trainers, replayed=None):
    plain, captured = trainers
    assert all(map(torch.equal, values(plain), values(captured)))
    assert plain.optimizer.param_groups[0].keys() == captured.optimizer.param_groups[0].keys()
    shown = [[(e.get("loss"), e.get("grad_norm"), e.get("eval_loss")) for e in t.state.log_history] for t in trainers]
    assert shown[0] == shown[1]
    assert plain.num_captured == 0
    assert captured.num_captured > 0 if replayed is None else captured.num_captured == replayed


class Tied(nn.Module):
    """Has a tied weight, a frozen one, one without a gradient, a norm with statistics, and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.unused, self.frozen, self.head = nn.Linear(2, 2), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)

    def forward(self, x, labels):
        x = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)
        return {"loss": nn.functional.cross_entropy(self.head(self.frozen(self.second(x))), labels)}


OPTIONS = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "no clipping": {"max_grad_norm": 0},
    "no clipping, accumulation": {"max_grad_norm": 0, "gradient_accumulation_steps": 2},
    "bfloat16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "skip": {"on_nonfinite": "skip"},
    "raise, accumulation": {"on_nonfinite": "raise", "gradient_accumulation_steps": 2},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1},
    "adamw_torch": {"optim": "adamw_torch"},
    "amsgrad": {"optim_args": "amsgrad=true"},
    "adagrad, accumulation": {"optim": "adagrad", "gradient_accumulation_steps": 2},
    "rmsprop": {"optim": "rmsprop"},
    "ema": {"ema_decay": 0.9},
    "evaluations": {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": samples(6, seed=4)},
    "operations counted": {"count_flops": True},
    "a schedule by metric": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "epoch",
        "eval_dataset": samples(6, seed=4),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_captured_steps_give_the_bits_of_ordinary_ones(both, options):
    assert_same(both(learning_rate=options.get("learning_rate", 1e-2), **without(options, "learning_rate")))


def without(options, name):
    return {key: value for key, value in options.items() if key != name}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", [CountedSum, IgnoresCount, ReturnsTuple, Tied], ids=lambda kind: kind.__name__)
def test_every_kind_of_loss_and_parameter_gives_the_same_bits(both, kind, accumulation):
    assert_same(both(kind(), gradient_accumulation_steps=accumulation, learning_rate=1e-2))


def test_a_loss_function_with_the_count_gives_the_same_bits(both):
    def summed(outputs, labels, num_items_in_batch):
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    assert_same(both(compute_loss_func=summed, gradient_accumulation_steps=2))


def test_tensors_that_a_model_makes_are_captured(both):
    class Makes(Classifier):
        def forward(self, x, labels=None):
            places = torch.arange(8, device=x.device) + torch.tensor(0.5)
            return super().forward(x + places * torch.rand(8), labels)

    assert_same(both(Makes()))


def test_all_steps_but_the_first_are_captured(both):
    assert_same(both(mode="graph", number=40), replayed=19)


def test_a_second_run_and_an_evaluation_of_a_trainer_give_the_same_bits(both):
    first = both(eval_dataset=samples(6))
    for trainer in first:
        torch.manual_seed(5)
        trainer.train()
    assert first[0].evaluate()["eval_loss"] == first[1].evaluate()["eval_loss"]
    assert all(map(torch.equal, values(first[0]), values(first[1])))


def test_a_resumed_run_gives_the_bits_of_one_that_never_stopped(make_trainer):
    def make(*callbacks, **options):
        torch.manual_seed(0)
        options = {"save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-2, **options}
        return make_trainer(40, model=Classifier(dropout=0.3), checkpointer=kept, callbacks=callbacks, **options)

    kept = MemoryCheckpointer()
    whole = make()
    whole.train()
    ends = [value.clone() for value in values(whole)]
    kept = MemoryCheckpointer()
    with pytest.raises(Stop):
        make(StopAt(6), step_compile="graph").train()
    resumed = make(step_compile="graph")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 10
    assert all(map(torch.equal, ends, values(resumed)))


# What changes during a run


def change(act):
    """Return the class of a callback that does something at the beginning of the fifth step."""

    def on_step_begin(self, args, state, control, **given):
        if state.global_step == 4:
            act(args, given)

    return type("Changes", (TrainerCallback,), {"on_step_begin": on_step_begin})


class Scaled(Classifier):
    def __init__(self):
        super().__init__()
        self.scale, self.powers = 1.0, [1, 2]

    def forward(self, x, labels=None):
        return super().forward(x * self.scale ** self.powers[1] + getattr(self, "shift", 0.0), labels)


def set_lr(args, given):
    given["optimizer"].param_groups[0]["lr"] = 0.05


def set_betas(args, given):
    given["optimizer"].param_groups[0]["betas"] = (0.5, 0.6)


def set_norm(args, given):
    args.max_grad_norm = 0.01


def freeze(args, given):
    given["model"].layers[0].requires_grad_(False)


def scale(args, given):
    given["model"].scale = 2.0


def scale_in_a_list(args, given):
    given["model"].powers[1] = 3


def set_a_new_attribute(args, given):
    given["model"].shift = 1.0


def to_evaluation_mode(args, given):
    given["model"].layers[2].eval()


def replace_forward(args, given):
    model = given["model"]
    model.forward = lambda x, labels=None: Classifier.forward(model, x + 1, labels)


def replace_layer(args, given):
    given["model"].layers[1] = nn.ReLU()


def load_moments(args, given):
    optimizer = given["optimizer"]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 2


def clear_moments(args, given):
    given["optimizer"].state.clear()


def change_weights(args, given):
    with torch.no_grad():
        given["model"].layers[0].weight.data = given["model"].layers[0].weight.data * 0.5


def leave_gradients(args, given):
    given["model"].layers[0].weight.grad = torch.ones(16, 8)


def smooth_labels(args, given):
    args.label_smoothing_factor = 0.3


CHANGES = [
    smooth_labels,
    set_lr,
    set_betas,
    set_norm,
    freeze,
    scale,
    scale_in_a_list,
    set_a_new_attribute,
    to_evaluation_mode,
    replace_forward,
    replace_layer,
    load_moments,
    clear_moments,
    change_weights,
    leave_gradients,
]


ABOUT_GRADIENTS = (set_norm, freeze, change_weights, leave_gradients)


@pytest.mark.parametrize(
    ("act", "accumulation"),
    [*((act, 1) for act in CHANGES), *((act, 2) for act in ABOUT_GRADIENTS)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_change_during_a_run_acts_as_in_an_ordinary_run(both, act, accumulation):
    model = Scaled()
    model.layers[2].p = 0.3
    options = {"learning_rate": 1e-2, "gradient_accumulation_steps": accumulation, "lr_scheduler_type": "constant"}
    assert_same(both(model, callbacks=[change(act)], number=40 * accumulation, **options))


def test_a_loss_function_that_is_assigned_during_a_run_acts_from_the_next_step(both):
    class Assigns(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                self.trainer.compute_loss_func = lambda outputs, labels: outputs["logits"].square().mean()

    def between(trainer):
        trainer.callback_handler.callbacks[-1].trainer = trainer

    def first(outputs, labels):
        return nn.functional.cross_entropy(outputs["logits"], labels)

    assert_same(both(callbacks=[Assigns], between=between, compute_loss_func=first, number=40))


def test_an_option_that_is_set_to_the_value_that_it_has_is_no_change(both):
    class SetsAgain(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            for group in optimizer.param_groups:
                group["eps"] = float(repr(group["eps"]))  # another object

    numbers = [both(callbacks=callbacks, number=40)[1].num_captured for callbacks in ([], [SetsAgain])]
    assert numbers[0] == numbers[1] > 0


def test_a_value_that_changes_in_every_step_makes_every_step_an_ordinary_one(both, caplog):
    class Anneals(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            model.scale = 1.0 + state.global_step

    assert_same(both(Scaled(), callbacks=[Anneals], number=80), replayed=0)
    assert "step 2 is an ordinary one: changed: scale from 1.0 to 2.0; such steps are captured if" in caplog.text
    assert caplog.text.count("is an ordinary one") == 1


def test_a_hook_that_is_registered_during_a_run_is_called(both, caplog):
    seen = []

    def register(args, given):
        given["model"].layers[0].register_forward_hook(lambda *called: seen.append(1))

    plain, captured = both(callbacks=[change(register)], number=40)
    assert_same((plain, captured), replayed=7 - 4)
    assert len(seen) == 2 * 16 + 0
    assert "layers.0 has hooks, whose Python code must run in every step" in caplog.text


def test_a_hook_of_a_parameter_is_called(both, caplog):
    def between(trainer):
        trainer.model.layers[0].weight.register_hook(lambda gradient: gradient * 2)

    assert_same(both(between=between), replayed=0)
    assert "the parameter layers.0.weight has hooks" in caplog.text


@pytest.mark.parametrize("event", ["on_micro_batch_end", "on_pre_optimizer_step", "on_optimizer_step"])
def test_a_callback_that_looks_at_gradients_sees_those_of_an_ordinary_step(both, caplog, event):
    seen = []

    def look(self, args, state, control, model=None, **kwargs):
        seen.append(model.layers[0].weight.grad.clone())

    listens = type("Looks", (TrainerCallback,), {event: look})
    assert_same(both(callbacks=[listens], gradient_accumulation_steps=2))
    assert f"the update of AdamW is an ordinary one: {event} of Looks may look at gradients" in caplog.text
    half = len(seen) // 2
    assert half > 4
    assert all(map(torch.equal, seen[:half], seen[half:]))


def test_a_callback_that_wants_the_outputs_gets_them_from_ordinary_steps(both, caplog):
    class Wants(TrainerCallback):
        def on_micro_batch_end(self, args, state, control, outputs=None, **kwargs):
            assert outputs["logits"].shape[1] == 3

    assert_same(both(callbacks=[Wants]), replayed=0)
    assert "a callback's on_micro_batch_end asks for the model's outputs" in caplog.text


def test_a_compute_loss_that_is_assigned_during_a_run_acts_from_the_next_step(both, caplog):
    class Assigns(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                self.trainer.compute_loss = self.twice

        def twice(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = model(**inputs)["loss"] * 2
            return (loss, None) if return_outputs else loss

    def between(trainer):
        trainer.callback_handler.callbacks[-1].trainer = trainer

    def assigns():
        return Assigns()

    assert_same(both(callbacks=[assigns], between=between, number=40), replayed=3)
    assert "the Trainer overrides compute_loss, whose Python code must run in every step" in caplog.text


# Shapes


def rows_of(lengths):
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(length, 8, generator=generator).sum(0).repeat(length, 1), "labels": torch.tensor(length % 3)}
        for length in lengths
    ]


class Sequences(Base):
    def forward(self, x, labels=None):
        return {"loss": nn.functional.cross_entropy(self.layers(x).mean(1), labels)}


def test_other_shapes_are_ordinary_steps_and_each_is_said_once(both, caplog):
    lengths = [n for n in (2, 2, 2, 3, 2, 3, 3, 4, 5, 6, 2, 4, 5, 6) for _ in range(4)]
    plain, captured = both(
        Sequences(), train_dataset=rows_of(lengths), num_train_epochs=3, train_sampling_strategy="sequential"
    )
    assert_same((plain, captured))
    said = [r.getMessage() for r in caplog.records if "the batch is (4, 3, 8) float32" in r.getMessage()]
    assert len(said) <= 2
    assert "too many kinds of steps are captured already" in caplog.text


def test_a_step_whose_micro_batches_have_several_shapes_gives_the_same_bits(both):
    lengths = [n for n in (2, 3, 2, 3, 3, 2, 2, 2, 2, 3) for _ in range(4)]
    options = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    assert_same(both(Sequences(), train_dataset=rows_of(lengths), **options))


@pytest.mark.parametrize("pack", [tuple, list, lambda row: {"x": row[0], "labels": row[1], "more": (1, "a", None)}])
def test_batches_of_every_form_are_captured(both, pack):
    class Takes(Classifier):
        def forward(self, x, labels=None, more=None):
            return super().forward(x, labels)

    def collate(rows):
        return pack((torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows])))

    assert_same(both(Takes(), data_collator=collate, remove_unused_columns=False))


# What cannot be captured


class Counts(Classifier):
    """Counts its calls."""

    calls = 0

    def forward(self, x, labels=None):
        self.calls += 1
        return super().forward(x, labels)


class Keeps(Classifier):
    """Keeps its last input, and a list of sums."""

    def __init__(self):
        super().__init__()
        self.sums = []

    def forward(self, x, labels=None):
        self.sums.append(x.sum())
        return super().forward(x, labels)


class Draws(Classifier):
    """Leaves its layers out at random."""

    def forward(self, x, labels=None):
        return super().forward(x * 0 if random.random() < 0.5 else x, labels)


class Branches(Classifier):
    """Computes something else for some inputs."""

    def forward(self, x, labels=None):
        return super().forward(x if x.sum() > 0 else -x, labels)


class Plain(Classifier):
    """Uses a tensor that is not a buffer."""

    def __init__(self):
        super().__init__()
        self.shift = torch.ones(8)

    def forward(self, x, labels=None):
        return super().forward(x + self.shift, labels)


CANNOT = {
    Counts: "changed: calls from 1 to 2",
    Keeps: "its forward sets Keeps.sums, which a capture would not do again",
    Draws: "it draws random numbers by Python or numpy",
    Branches: "depends on the content of a tensor",
    Plain: "uses a tensor that is neither an input, a parameter nor a buffer; register it as a buffer",
}


@pytest.mark.parametrize("kind", CANNOT, ids=lambda kind: kind.__name__)
def test_a_model_that_cannot_be_captured_trains_by_ordinary_steps_and_the_log_says_why(both, caplog, kind):
    random.seed(0)
    state = random.getstate()
    model = kind()
    plain, captured = both(model, between=lambda trainer: random.setstate(state))
    assert_same((plain, captured), replayed=0)
    assert CANNOT[kind] in caplog.text
    assert getattr(captured.model, "calls", 22) == 22
    assert len(getattr(captured.model, "sums", range(22))) == 22


@pytest.mark.parametrize("kind", CANNOT, ids=lambda kind: kind.__name__)
def test_a_model_that_cannot_be_captured_is_refused_before_training_if_that_is_asked_for(make_trainer, kind):
    trainer = make_trainer(8, model=kind(), step_compile="graph")
    before = [value.clone() for value in trainer.model.state_dict().values()]
    with pytest.raises(
        ValueError, match=r"(?s)step_compile='graph' cannot capture the step: .*set step_compile='auto'"
    ):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(map(torch.equal, before, trainer.model.state_dict().values()))


def test_a_loss_function_that_logs_is_an_ordinary_step(both, caplog):
    holder = []

    def loss(outputs, labels):
        found = nn.functional.cross_entropy(outputs["logits"], labels)
        holder[-1].log_metric("own", found.detach())
        return found

    plain, captured = both(compute_loss_func=loss, between=holder.append)
    assert_same((plain, captured), replayed=0)
    assert "log_metric is called in it" in caplog.text
    assert [e["own"] for e in plain.state.log_history if "own" in e] == [
        e["own"] for e in captured.state.log_history if "own" in e
    ]


class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


REFUSED = {
    "override": ({"trainer_class": Own}, "the Trainer overrides compute_loss"),
    "torch_compile": ({"torch_compile_backend": "eager"}, "torch_compile=True needs the ordinary step"),
    "checkpointing": ({"activation_checkpointing": True}, "activation_checkpointing=True needs the ordinary step"),
    "batch size": ({"auto_find_batch_size": True}, "auto_find_batch_size=True needs the ordinary step"),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_what_needs_the_ordinary_step_is_refused_at_construction_or_said_in_the_log(
    make_trainer, both, caplog, options, reason
):
    with pytest.raises(ValueError, match=f"step_compile='graph' cannot capture the step: {reason}"):
        make_trainer(8, step_compile="graph", **options)
    if "activation_checkpointing" not in options:
        assert_same(both(**options), replayed=0)
        assert f"step_compile: step 1 is an ordinary one: {reason}" in caplog.text


def test_checkpointed_layers_have_the_gradients_of_the_same_dropout(both, caplog):
    class Recomputes(Classifier):
        def forward(self, x, labels=None):
            from torch.utils.checkpoint import checkpoint

            logits = checkpoint(self.layers, x, use_reentrant=False)
            return {"loss": nn.functional.cross_entropy(logits, labels)}

    assert_same(both(Recomputes(dropout=0.4)), replayed=0)
    assert "it sets the state of random numbers, as checkpointing of activations does" in caplog.text


def test_the_update_of_an_optimizer_that_keeps_numbers_is_an_ordinary_one(both, caplog):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["n"] = state.get("n", 0) + 1
            return super().step(closure)

    def build(groups, **options):
        return Counting(groups, **options)

    assert_same(both(optimizer_cls_and_kwargs=(build, {"lr": 0.1})))
    assert "the update of Counting is an ordinary one: its state holds 'n', which are not tensors" in caplog.text


@pytest.mark.parametrize("is_changed", [False, True], ids=["written anew", "changed"])
def test_the_update_of_an_optimizer_whose_step_changes_a_setting_is_an_ordinary_one(is_changed, both, caplog):
    def build(groups, **options):
        calls = itertools.count()

        class Setting(torch.optim.AdamW):
            def step(self, closure=None):
                number = next(calls) if is_changed else 0
                for group in self.param_groups:
                    group["history"] = [1] * (1 + (number > 0))  # the first step is not captured
                return super().step(closure)

        return Setting([{**group, "history": [1]} for group in groups], fused=True, **options)

    assert_same(both(optimizer_cls_and_kwargs=(build, {"lr": 0.1})))
    assert ("the update of Setting is an ordinary one: its step changes history" in caplog.text) is is_changed


def test_the_update_of_an_optimizer_that_changes_itself_is_an_ordinary_one(both, caplog):
    class Changing(torch.optim.AdamW):
        def step(self, closure=None):
            self.calls = getattr(self, "calls", 0) + 1
            vars(self).update(dict.fromkeys("abcde", self.calls))
            return super().step(closure)

    def build(groups, **options):
        return Changing(groups, fused=True, **options)

    assert_same(both(optimizer_cls_and_kwargs=(build, {"lr": 0.1})))
    assert "its step changes a, b, c, calls, d in Python" in caplog.text  # the first five


def test_an_argument_of_this_name_cannot_change_after_construction(make_trainer):
    trainer = make_trainer(8)
    trainer.args.step_compile = "auto"
    with pytest.raises(ValueError, match="step_compile from 'off' to 'auto'"):
        trainer.train()


# Compiled


@pytest.mark.slow
@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}], ids=["float32", "bfloat16"])
def test_compiled_steps_are_close_to_ordinary_ones(both, caplog, options):
    """With the same dropout. AdamW turns a gradient's last bit into more where the gradient is near zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own imports
        plain, captured = both(number=40, learning_rate=1e-3, **options)
    assert "compiled by inductor" in caplog.text
    assert captured.num_captured > 0
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if options else {"rtol": 1e-5, "atol": 1e-6}
    losses = [torch.tensor([e["loss"] for e in t.state.log_history if "loss" in e]) for t in (plain, captured)]
    torch.testing.assert_close(losses[1], losses[0], **tolerance)
    for one, other in zip(values(plain), values(captured), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.6.1"])
def test_a_compiler_that_draws_other_random_numbers_is_not_used(version, monkeypatch):
    monkeypatch.setattr(running, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(NotCapturableError, match=rf"torch {re.escape(version)} draws other random numbers"):
        running.compiled(None, [])


# On a GPU


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 3}, {"bf16": True}, {"optim": "sgd"}, {"on_nonfinite": "skip"}]
)
def test_cuda_graphs_are_close_to_ordinary_steps(both, caplog, options):
    """The rate is rounded to float32 in the graph; all else has the same operations."""
    plain, captured = both(use_cpu=False, learning_rate=1e-3, **options)
    assert "CUDA graph" in caplog.text
    assert captured.num_captured > 0
    for one, other in zip(values(plain), values(captured), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("act", CHANGES, ids=lambda act: act.__name__)
def test_a_change_during_a_run_acts_in_cuda_graphs(both, act):
    if act is leave_gradients:
        pytest.skip("makes a gradient on the host")
    plain, captured = both(Scaled(), callbacks=[change(act)], use_cpu=False, learning_rate=1e-3)
    for one, other in zip(values(plain), values(captured), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
def test_cuda_graphs_read_nothing_from_the_device(make_trainer):
    class Strict(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            torch.cuda.set_sync_debug_mode("error" if 4 < state.global_step < 9 else "default")

    try:
        make_trainer(80, step_compile="graph", use_cpu=False, callbacks=[Strict()], logging_steps=100).train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
