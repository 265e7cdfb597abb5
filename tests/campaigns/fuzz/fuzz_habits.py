"""What users do to a Trainer in the middle of things: one small function each.

A habit acts on anything with a Trainer's attributes: ours, transformers', and the loop by hand, which has the same
names for what habits touch. Where by hand something else has to be done, `by_hand` says what.
"""

import functools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_data import Samples, evaluation_data, samples_of, twice
from fuzz_losses import loss_between
from fuzz_optimizers import optimizer_of
from fuzz_trace import figures
from torch import nn

EVENTS = (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end",
    "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_evaluate", "on_log",
)  # fmt: skip


@dataclass(frozen=True)
class Habit:
    """Something that users do.

    Attributes:
        event: when: `before` is between building the Trainer and training.
        act: what is done to the Trainer, or to the loop by hand if `by_hand` is None.
        by_hand: what is done to the loop by hand.
        lasts: whether it is done at every such event from its step on, so that a resumed run does it too.
        reference: whether transformers' Trainer does it right.
        refusable: whether it is right, too, to refuse it in words.
        suits: whether it can be done to a run.
    """

    event: str
    act: Callable[[Any], None]
    by_hand: Callable[[Any], None] | None = None
    lasts: bool = False
    reference: bool = True
    refusable: bool = False
    suits: Callable[[Any], bool] = lambda run: True


HABITS: dict[str, Habit] = {}


def habit(event, **options):
    """Register a function as a habit."""

    def register(act):
        HABITS[act.__name__] = Habit(event, act, **options)
        return act

    return register


def follows_metric(run):
    """Whether the schedule goes by evaluations."""
    return run.schedule == "reduce_lr_on_plateau" and run.optimizer != "given_both"


def changes(**fields):
    """Return what changes the description that the loop by hand goes by."""

    def change(hand):
        hand.run = replace(hand.run, **fields)

    return change


def nothing(hand):
    """Do nothing: this is not to change the training."""


# The optimizer and its rates


@habit("on_step_begin", lasts=True, reference=False)  # there the log has what the schedule last set
def lower_the_rate(trainer):
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.1


@habit("on_step_begin")
def decay_more(trainer):
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.3


@habit("on_step_end")
def forget_moments(trainer):
    trainer.optimizer.state.clear()


@habit("on_step_end", suits=lambda run: not follows_metric(run))
def step_the_schedule_once_more(trainer):
    trainer.lr_scheduler.step()


@habit("on_pre_optimizer_step", lasts=True)
def clamp_gradients(trainer):
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-0.01, 0.01)


@habit("on_substep_end", reference=False)  # there the optimizer is wrapped, and clears nothing within a step
def drop_the_gradient_so_far(trainer):
    trainer.optimizer.zero_grad()


@habit("on_step_end", by_hand=lambda hand: setattr(hand.args, "max_grad_norm", 0.05))
def clip_at_less(trainer):
    trainer.args.max_grad_norm = 0.05


@habit("on_step_end", by_hand=lambda hand: setattr(hand.args, "max_grad_norm", 0.0))
def clip_no_more(trainer):
    trainer.args.max_grad_norm = 0.0


@habit("before", by_hand=lambda hand: setattr(hand, "optimizer", torch.optim.SGD(hand.model.parameters(), lr=0.5)))
def set_the_optimizer(trainer):
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)


def _halve_second_group(hand):
    hand.optimizer = hand.optimizer or optimizer_of(hand.run, hand.model)
    hand.optimizer.param_groups[-1]["lr"] *= 0.5


@habit(  # with a part of the model replaced afterwards, one of the two changes would be lost: that is refused
    "before",
    by_hand=_halve_second_group,
    refusable=True,
    suits=lambda run: run.optimizer not in ("given", "given_both"),
)
def create_the_optimizer_and_edit_a_group(trainer):
    trainer.create_optimizer()
    trainer.optimizer.param_groups[-1]["lr"] *= 0.5


@habit(
    "before",
    by_hand=changes(rate=0.002),
    refusable=True,
    suits=lambda run: run.optimizer in ("adamw_torch", "sgd", "adafactor"),
)
def set_another_learning_rate(trainer):
    trainer.args.learning_rate = 0.002


@habit("before", by_hand=changes(max_steps=3))
def set_max_steps(trainer):
    trainer.args.max_steps = 3


def _step_schedule(trainer):
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, gamma=0.5)


def _step_schedule_by_hand(hand):
    hand.optimizer = hand.optimizer or optimizer_of(hand.run, hand.model)
    _step_schedule(hand)


@habit(  # refused where a part of the model is replaced afterwards: the optimizer is built again, without the schedule
    "before",
    by_hand=_step_schedule_by_hand,
    refusable=True,
    suits=lambda run: "given" not in run.optimizer and not follows_metric(run),
)
def set_the_schedule(trainer):
    trainer.create_optimizer()
    _step_schedule(trainer)


@habit("on_step_end", refusable=True)
def set_the_optimizer_in_the_middle(trainer):
    trainer.optimizer = torch.optim.SGD([p for p in trainer.model.parameters() if p.requires_grad], lr=0.5)


@habit("on_step_end", refusable=True, suits=lambda run: not follows_metric(run))
def set_the_schedule_in_the_middle(trainer):
    _step_schedule(trainer)


@habit("on_step_begin", lasts=True)
def change_the_betas(trainer):
    for group in trainer.optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.5, 0.9)


@habit("on_pre_optimizer_step", lasts=True)
def drop_a_gradient(trainer):
    next(trainer.model.parameters()).grad = None


@habit("on_pre_optimizer_step", lasts=True)
def scale_the_gradients(trainer):
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(3.0)


def _unfreeze_and_add(trainer):
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    if frozen:
        trainer.optimizer.add_param_group({"params": frozen})


def _unfreeze_and_add_by_hand(hand):
    _unfreeze_and_add(hand)
    schedule, (_, *added) = hand.lr_scheduler, hand.optimizer.param_groups
    for group in added[len(schedule.base_lrs) - 1 :]:
        schedule.base_lrs.append(group["lr"])
        schedule.lr_lambdas.append(schedule.lr_lambdas[0])


@habit(
    "on_step_begin", by_hand=_unfreeze_and_add_by_hand, reference=False,  # there the schedule fails
    suits=lambda run: run.model == "mlp_frozen" and run.optimizer != "given_both" and not follows_metric(run),
)  # fmt: skip
def unfreeze_and_add_to_the_optimizer(trainer):
    _unfreeze_and_add(trainer)


# The model


@habit("on_step_end")
def leave_the_model_in_evaluation_mode(trainer):
    trainer.model.eval()


@habit("on_log", by_hand=nothing, suits=lambda run: run.model != "mlp_norm")
def sample_in_a_log(trainer):
    trainer.model.eval()


@habit("on_substep_end")
def leave_evaluation_mode_between_micro_batches(trainer):
    trainer.model.eval()


@habit("on_evaluate")
def leave_training_mode_after_an_evaluation(trainer):
    trainer.model.train()


@habit("on_step_begin", lasts=True)
def freeze_a_layer(trainer):
    next(trainer.model.parameters()).requires_grad_(False)


@habit("on_step_begin", refusable=True)
def unfreeze_all(trainer):
    trainer.model.requires_grad_(True)


@habit("before")
def freeze_before_training(trainer):
    next(trainer.model.parameters()).requires_grad_(False)


@habit("on_step_end")
def halve_the_weights(trainer):
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(0.5)


def _new_head(trainer):
    last = trainer.model.last
    with torch.random.fork_rng():
        torch.manual_seed(3)
        trainer.model.last = nn.Linear(last.in_features, last.out_features)


@habit("before", suits=lambda run: run.kind in ("classes", "numbers") and "given" not in run.optimizer)
def take_a_new_head(trainer):
    _new_head(trainer)


@habit("before", suits=lambda run: run.kind in ("classes", "numbers") and "given" not in run.optimizer)
def take_a_new_head_after_an_evaluation(trainer):
    trainer.evaluate()
    _new_head(trainer)


@habit("on_step_end", suits=lambda run: run.kind in ("classes", "numbers"), refusable=True, reference=False)
def take_a_new_head_in_the_middle(trainer):
    _new_head(trainer)


@habit("on_step_begin", by_hand=lambda hand: _restore(hand))
def load_weights(trainer):
    _restore(trainer)


def _restore(trainer):
    trainer.model.load_state_dict(
        {n: torch.full_like(v, 0.125) if v.is_floating_point() else v for n, v in trainer.model.state_dict().items()}
    )


@habit("before")
def wrap_the_forward(trainer):
    forward = trainer.model.forward

    @functools.wraps(forward)
    def doubled(*args, **inputs):
        outputs = forward(*args, **inputs)
        if outputs.get("loss") is not None:
            outputs["loss"] = outputs["loss"] * 2
        return outputs

    trainer.model.forward = doubled


@habit("on_step_begin", lasts=True, reference=False)  # whose loaders draw from the same stream
def change_the_dropout(trainer):
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.6


@habit("on_step_begin", lasts=True, reference=False, suits=lambda run: run.model == "mlp_norm")
def keep_a_norm_in_evaluation_mode(trainer):
    trainer.model.middle.norm.eval()


# What is asked for


@habit("on_step_end")
def stop_training(trainer):
    trainer.control.should_training_stop = True


@habit("on_epoch_end")
def stop_at_the_end_of_an_epoch(trainer):
    trainer.control.should_training_stop = True


@habit("on_evaluate")
def stop_after_an_evaluation(trainer):
    trainer.control.should_training_stop = True


@habit("on_step_begin", reference=False)  # there it stops after the first micro-batch
def stop_before_a_step(trainer):
    trainer.control.should_training_stop = True


@habit("on_substep_end", reference=False)
def stop_between_micro_batches(trainer):
    trainer.control.should_training_stop = True


@habit("on_step_end", refusable=True, reference=False, by_hand=changes(eval_steps=1))
def evaluate_more_often(trainer):
    trainer.args.eval_steps = 1


@habit("on_step_end", suits=lambda run: run.loader != "own_generator")  # by hand an epoch is drawn whole
def stop_the_epoch(trainer):
    trainer.control.should_epoch_stop = True


@habit("on_step_end")
def ask_for_an_evaluation(trainer):
    trainer.control.should_evaluate = True


@habit("on_step_end", by_hand=nothing)
def ask_for_a_log(trainer):
    trainer.control.should_log = True


@habit("on_step_end", by_hand=nothing, reference=False)
def log_something(trainer):
    trainer.log({"something": 1.0})


@habit("on_step_end", reference=False, by_hand=nothing)
def log_a_metric(trainer):
    trainer.log_metric("something", 1.0)


@habit("on_step_end", lasts=True, reference=False)  # there it takes back the log or evaluation that is due
def evaluate_in_a_callback(trainer):
    trainer.evaluate()


@habit("on_step_end", by_hand=nothing)
def predict_in_a_callback(trainer):
    trainer.predict(evaluation_data(replace(trainer.run_of_fuzz, eval_sets=False)))


@habit("before")
def evaluate_first(trainer):
    trainer.evaluate()


@habit("before", by_hand=nothing)
def predict_first(trainer):
    trainer.predict(evaluation_data(replace(trainer.run_of_fuzz, eval_sets=False)))


@habit("on_step_end", lasts=True)
def draw_random_numbers(trainer):
    torch.rand(3)


# Parts put in the place of others


@habit("before", by_hand=lambda hand: setattr(hand, "data_collator", twice), suits=lambda run: run.loader == "trainer")
def set_the_collator(trainer):
    trainer.data_collator = twice


@habit("before", by_hand=changes(metrics=True))
def set_compute_metrics(trainer):
    trainer.compute_metrics = figures


@habit("on_step_end", by_hand=changes(metrics=True))
def set_compute_metrics_in_the_middle(trainer):
    trainer.compute_metrics = figures


def _mean_loss(trainer):
    run = trainer.run_of_fuzz
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: (
        loss_between(run, outputs["logits"], labels, num_items_in_batch) * 2
    )


def _mean_loss_by_hand(hand):
    hand.run = replace(hand.run, loss="function_counted")
    run = hand.run
    hand.compute_loss_func = lambda outputs, labels, num_items_in_batch: (
        loss_between(run, outputs["logits"], labels, num_items_in_batch) * 2
    )


@habit("before", by_hand=_mean_loss_by_hand, suits=lambda run: run.loss in ("model", "function", "function_counted"))
def set_a_loss_function(trainer):
    _mean_loss(trainer)


@habit(
    "on_step_end", by_hand=_mean_loss_by_hand, reference=False,
    suits=lambda run: run.loss in ("model", "function", "function_counted"),
)  # fmt: skip
def set_a_loss_function_in_the_middle(trainer):
    _mean_loss(trainer)


@habit(
    "on_epoch_begin", by_hand=lambda hand: setattr(hand, "data_collator", twice), reference=False, refusable=True,
    suits=lambda run: run.loader == "trainer",
)  # fmt: skip
def set_the_collator_in_the_middle(trainer):
    trainer.data_collator = twice


def _doubled_loss(trainer):
    before = trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        found = before(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        return (found[0] * 2, found[1]) if return_outputs else found * 2

    trainer.compute_loss = compute_loss


def _doubled_loss_by_hand(hand):
    before = hand.loss
    hand.loss = lambda batch, items: before(batch, items) * 2


@habit("before", by_hand=_doubled_loss_by_hand, suits=lambda run: run.loss != "parts")
def set_compute_loss(trainer):
    _doubled_loss(trainer)


@habit("on_step_end", by_hand=_doubled_loss_by_hand, refusable=True, suits=lambda run: run.loss != "parts")
def set_compute_loss_in_the_middle(trainer):
    _doubled_loss(trainer)


def _doubled_inputs(batch):
    return {name: value * 2 if value.is_floating_point() else value for name, value in batch.items()}


def _step_of_doubled_inputs(trainer):
    before = trainer.training_step
    trainer.training_step = lambda model, inputs, items=None: before(model, _doubled_inputs(inputs), items)


@habit("before", by_hand=lambda hand: setattr(hand, "prepare_inputs", _doubled_inputs))
def set_training_step(trainer):
    _step_of_doubled_inputs(trainer)


@habit("on_step_end", by_hand=lambda hand: setattr(hand, "prepare_inputs", _doubled_inputs), refusable=True)
def set_training_step_in_the_middle(trainer):
    _step_of_doubled_inputs(trainer)


@habit("before", by_hand=lambda hand: _loss_of_its_own_batch(hand))
def say_that_the_model_takes_no_count(trainer):
    trainer.model_accepts_loss_kwargs = False


def _loss_of_its_own_batch(hand):
    if hand.run.loss in ("model", "override_counted"):
        hand.run = replace(hand.run, loss="model_uncounted" if hand.run.loss == "model" else "override")


@habit("before", suits=lambda run: not run.is_stream)
def set_the_training_data(trainer):
    run = trainer.run_of_fuzz
    trainer.train_dataset = Samples(samples_of(run, run.length, seed=7))


@habit("on_step_end")
def set_the_evaluation_data(trainer):
    trainer.eval_dataset = evaluation_data(replace(trainer.run_of_fuzz, eval_length=4, eval_sets=False))


@habit("on_epoch_begin", suits=lambda run: run.data == "torch", reference=False)
def change_the_data(trainer):
    trainer.train_dataset.scale = 2


@habit(
    "on_epoch_begin", by_hand=lambda hand: setattr(hand.train_dataset, "scale", 2), reference=False,
    suits=lambda run: run.data == "torch" and run.loader == "trainer",
)  # fmt: skip
def change_the_data_of_the_loader(trainer):
    trainer.given_to_callback["train_dataloader"].dataset.scale = 2


class Stopped(Exception):
    """What ends a run in the middle."""


class Acts:
    """A callback that does what a run's habits say, and ends it where that is asked for.

    Args:
        run: whose habits.
        stop: how to end it, after which step, and at which event; None does not end it.

    Attributes:
        has_stopped: whether it ended it.
    """

    def __init__(self, run, stop=None):
        self.habits = [(HABITS[name], step) for name, step in run.habits]
        self.run, self.trainer, self.stop, self.has_stopped = run, None, stop, False

    def before(self, trainer):
        """Act between building a Trainer and training with it."""
        self.trainer = trainer
        trainer.run_of_fuzz = self.run
        if self.run.around == "before":
            trainer.evaluate()
        self.tell(trainer, "before")

    def tell(self, trainer, event):
        """Act at an event, on a Trainer or by hand."""
        step, is_by_hand = trainer.state.global_step, hasattr(trainer, "batches")
        for found, at in self.habits:
            if found.event == event and (event == "before" or step == at or (found.lasts and step > at)):
                (found.by_hand if is_by_hand and found.by_hand else found.act)(trainer)

    def hear(self, event, state, control, given):
        """Act at an event of a Trainer."""
        if self.trainer is None:
            return
        self.trainer.given_to_callback = given
        self.tell(self.trainer, event)
        if self.stop is not None and self.stop[1:] == (state.global_step, event) and not self.has_stopped:
            self._end(state, control)

    def _end(self, state, control):
        how = self.stop[0]
        self.has_stopped = True
        if how == "raise":
            raise Stopped("stopped on purpose")
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            control.should_training_stop = True


def _listener(event):
    def listen(self, args, state, control, **kwargs):
        self.hear(event, state, control, kwargs)

    return listen


for _event in (*EVENTS, "on_init_end", "on_prediction_step", "on_predict", "on_save", "on_push_begin"):
    setattr(Acts, _event, _listener(_event))
