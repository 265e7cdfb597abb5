"""Habits of which the losses and weights are those of a loop written by hand."""

import dataclasses
from types import MethodType

import numpy as np
import pytest
import torch
from habit_parts import RATE, Net, assert_equals, at_step, batches, by_hand, hand, rows, stack, when
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import ConcatDataset, DataLoader, SequentialSampler, Subset, TensorDataset

from tr_core import Trainer


def then(act, **parts):
    """Return what builds a Trainer and does something to it."""

    def build(make):
        trainer = make(**parts)
        act(trainer)
        return trainer

    return build


def twice(act, **parts):
    """Return what builds a Trainer, trains it, and does something to it before it is trained again."""
    return then(lambda trainer: (trainer.train(), act(trainer)), **parts)


def put(name, value):
    return lambda trainer: setattr(trainer, name, value)


def bind(method):
    """Return what puts a function in the place of the Trainer's method of its name."""
    return lambda trainer: setattr(trainer, method.__name__, MethodType(method, trainer))


def built(**parts):
    return lambda make: make(**parts)


def losing(function, **parts):
    """Return what builds a Trainer whose `compute_loss` is a function of model and inputs."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return function(model, inputs)

    return lambda make: make(Own, **parts)


def trained_before(**how):
    return lambda model: by_hand(model, batches(rows()), **how)


def groups(optimizer, **values):
    for group in optimizer.param_groups:
        group.update(values)


def frozen(model):
    model.body.requires_grad_(False)


def thawed_at(step):
    return lambda number, model: model.body.requires_grad_(True) if number == step else None


def linear(step):
    return 1 - step / 4


def error(model, batch):
    return model(batch["x"])["logits"] - batch["labels"]


def absolute(model, batch):
    return error(model, batch).abs().mean()


def changed(batch, x=1, labels=1):
    return {"x": x * batch["x"], "labels": labels * batch["labels"]}


# Functions, models and optimizers of users


def absolute_of_outputs(outputs, labels):
    return (outputs["logits"] - labels).abs().mean()


def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    return absolute(model, inputs)


def create_optimizer(self, model=None):
    self.optimizer = torch.optim.SGD([{"params": self.model.head.parameters(), "lr": 0.5}], lr=0.5)
    return self.optimizer


def training_step(self, model, inputs, num_items_in_batch=None):
    model.train()
    loss = self.compute_loss(model, inputs)
    (loss * 0.5).backward()
    return loss.detach()


def halved_gradient(model, batch):
    loss = model(**batch)["loss"]
    loss.register_hook(lambda gradient: gradient * 0.5)
    return loss


def in_place(model, batch):
    batch["x"].mul_(2)
    batch["labels"] += 1
    return model(**batch)["loss"]


class ByPosition(Net):
    def forward(self, *parts):
        return super().forward(*parts)


class OneTensor(Net):
    def forward(self, both):
        return super().forward(both[:, :4], both[:, 4])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.first.weight)
        nn.init.eye_(self.second.weight)

    def forward(self, x, labels=None):
        logits = self.second(self.first(x)).sum(-1)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def tie(model):
    model.second.weight = model.first.weight


def half_of_the_head(model):
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)


def step_schedule(make):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return make(model=model, optimizers=(optimizer, StepLR(optimizer, step_size=2, gamma=0.1)))


def own_optimizer(make):
    model = Net()
    return make(model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None), lr_scheduler_type="linear")


def thawed_after_create_optimizer(trainer):
    frozen(trainer.model)
    trainer.create_optimizer()
    trainer.model.body.requires_grad_(True)
    trainer.optimizer.add_param_group({"params": list(trainer.model.body.parameters())})


def thawed_in_the_run(make):
    def thaw(model, optimizer, **_):
        model.body.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.body.parameters())})

    return then(lambda trainer: frozen(trainer.model), callbacks=[at_step(2, thaw)])(make)


def accelerated(trainer):
    from accelerate import Accelerator

    loader = Accelerator(cpu=True).prepare(DataLoader(trainer.train_dataset, batch_size=2))
    trainer.get_train_dataloader = lambda: loader


# What callbacks do


def clamp(model, **_):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def halve_gradients(model, **_):
    for parameter in model.parameters():
        parameter.grad *= 0.5


def decay_by_hand(number, model):
    for parameter in model.parameters():
        parameter.grad += 0.5 * parameter.detach()


def lower_base_rates(lr_scheduler, **_):
    lr_scheduler.base_lrs = [0.01 for _ in lr_scheduler.base_lrs]


def clip(model, **_):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


EXTRA = batches(rows())[3]
FIRST, SECOND, THIRD, FOURTH = batches(rows())
PAIRS = [[FIRST, SECOND], [THIRD, FOURTH]]
IN_PAIRS = {"gradient_accumulation_steps": 2, "max_steps": 2}
WHOLE = stack(rows())
OTHERS = rows(12, seed=5)

HABITS = {
    # Arguments
    "a rate changed between two runs is that of the second": (
        twice(lambda trainer: setattr(trainer.args, "learning_rate", 0.01)),
        hand(first=trained_before(), rate=0.01),
    ),
    "other arguments set on the trainer before training are used": (
        then(lambda t: setattr(t, "args", dataclasses.replace(t.args, learning_rate=0.3, max_steps=2))),
        hand(batches(rows())[:2], rate=0.3),
    ),
    "numbers given as texts are numbers": (built(learning_rate="1e-1", max_steps="4"), hand()),
    # Functions and methods set on the Trainer
    "a loss function set on the trainer is the loss that is trained": (
        then(put("compute_loss_func", absolute_of_outputs)),
        hand(loss=absolute),
    ),
    "a loss function taken away leaves the models own loss": (
        then(put("compute_loss_func", None), compute_loss_func=absolute_of_outputs),
        hand(),
    ),
    "compute loss bound to the trainer acts": (then(bind(compute_loss)), hand(loss=absolute)),
    "compute loss that is a plain function without the count acts": (
        then(put("compute_loss", lambda model, inputs, return_outputs=False: absolute(model, inputs)), **IN_PAIRS),
        hand(PAIRS, loss=absolute),
    ),
    "a collator set before training makes the batches": (
        then(put("data_collator", lambda samples: changed(stack(samples), x=2, labels=2))),
        hand([changed(batch, x=2, labels=2) for batch in batches(rows())]),
    ),
    "a loader set by a lambda gives the batches": (
        then(put("get_train_dataloader", lambda: DataLoader(OTHERS, batch_size=3))),
        hand(batches(OTHERS, 3)),
    ),
    "a loader that is a list of batches will do": (
        then(put("get_train_dataloader", lambda: batches(rows()))),
        hand(),
    ),
    "a loader prepared by an accelerator will do": (then(accelerated), hand()),
    "a sampler set by a lambda with the data gives the order": (
        then(put("_get_train_sampler", lambda data: SequentialSampler(data)), train_sampling_strategy="random"),
        hand(),
    ),
    "a sampler set by a lambda without an argument gives the order": (
        then(put("_get_train_sampler", lambda: SequentialSampler(rows())), train_sampling_strategy="random"),
        hand(),
    ),
    "the forward of a model replaced after construction is what trains": (
        then(lambda t: setattr(t.model, "forward", lambda x, labels=None: Net.forward(t.model, 3 * x, labels))),
        hand([changed(batch, x=3) for batch in batches(rows())]),
    ),
    "create optimizer set by a function makes the optimizer": (
        then(bind(create_optimizer)),
        hand(first=frozen, rate=0.5),
    ),
    "training step with its own backward is what trains": (then(bind(training_step)), hand(rate=RATE / 2)),
    # Losses
    "a loss of shape one trains": (losing(lambda model, batch: error(model, batch).square().mean()[None]), hand()),
    "a loss in double precision trains": (losing(lambda model, b: error(model, b).double().square().mean()), hand()),
    "a manual loss scale in a gradient hook of the loss acts": (losing(halved_gradient), hand(rate=RATE / 2)),
    "inputs changed in place leave the data as it is": (
        losing(in_place, max_steps=8),
        hand([{"x": 2 * batch["x"], "labels": batch["labels"] + 1} for batch in batches(rows())] * 2),
    ),
    # Data
    "batches of a tensor data set are given by position": (
        lambda make: make(model=ByPosition(), train_dataset=TensorDataset(WHOLE["x"], WHOLE["labels"])),
        hand(),
    ),
    "a batch that is a tensor is the models only argument": (
        lambda make: make(
            model=OneTensor(),
            train_dataset=[torch.cat([row["x"], row["labels"][None]]) for row in rows()],
            data_collator=torch.stack,
        ),
        hand(),
    ),
    "one sample is a run of one step an epoch": (
        built(train_dataset=rows(1), max_steps=-1, num_train_epochs=3),
        hand([stack(rows(1))] * 3),
    ),
    "another data set between two runs is trained on": (
        twice(put("train_dataset", rows(8, seed=9))),
        hand(batches(rows(8, seed=9)), first=trained_before()),
    ),
    "parts and unions of data sets are read like any other": (
        built(train_dataset=ConcatDataset([Subset(rows(), range(4)), Subset(rows(), range(4, 8))])),
        hand(),
    ),
    "a batch taken from the loader in a callback is not missing from the run": (
        built(callbacks=[when(on_train_begin=lambda train_dataloader, **_: next(iter(train_dataloader)))]),
        hand(),
    ),
    # Models
    "another model set before training is the one that trains": (
        then(lambda trainer: setattr(trainer, "model", Net(seed=3))),
        hand(model=lambda: Net(seed=3)),
    ),
    "a model compiled in place trains": (then(lambda trainer: trainer.model.compile(backend="eager")), hand()),
    "layers frozen before training keep their weights": (then(lambda t: frozen(t.model)), hand(first=frozen)),
    "a layer frozen in a run stays from then on": (
        built(callbacks=[at_step(2, lambda model, **_: frozen(model))]),
        hand(after=lambda number, model: frozen(model) if number == 2 else None),
    ),
    "a layer frozen and thawed again in a run is trained": (
        built(
            callbacks=[when(on_step_begin=lambda model, state, **_: model.body.requires_grad_(state.global_step > 1))]
        ),
        hand(first=frozen, after=thawed_at(2)),
    ),
    "a layer thawed in a run and given to the optimizer is trained": (
        thawed_in_the_run,
        hand(first=frozen, after=thawed_at(2)),
    ),
    "a gradient hook changes what is applied": (
        then(lambda trainer: half_of_the_head(trainer.model)),
        hand(first=half_of_the_head),
    ),
    "a parametrization added after construction is trained": (
        then(lambda trainer: parametrizations.weight_norm(trainer.model.head)),
        hand(first=lambda model: parametrizations.weight_norm(model.head)),
    ),
    "weights tied after construction get one update": (
        lambda make: then(lambda trainer: tie(trainer.model), model=Tied(), learning_rate=0.001)(make),
        hand(model=Tied, first=tie, rate=0.001),
    ),
    # Optimizers
    "an optimizer that is given is used with the schedule of the arguments": (
        own_optimizer,
        hand(rate=lambda step: 0.5 * linear(step)),
    ),
    "an optimizer and a schedule that are given are used": (
        step_schedule,
        hand(rate=lambda step: 0.5 * 0.1 ** (step // 2)),
    ),
    "a schedule of the created optimizer is used": (
        then(lambda trainer: setattr(trainer, "lr_scheduler", LambdaLR(trainer.create_optimizer(), linear))),
        hand(rate=lambda step: RATE * linear(step)),
    ),
    "a group added after create optimizer is trained": (then(thawed_after_create_optimizer), hand()),
    # Callbacks
    "a rate set before every step is that of every step": (
        built(
            callbacks=[
                when(on_step_begin=lambda optimizer, state, **_: groups(optimizer, lr=RATE / (1 + state.global_step)))
            ]
        ),
        hand(rate=lambda step: RATE / (1 + step)),
    ),
    "a rate set at the end of a step is that of the next until the schedule sets it again": (
        built(callbacks=[at_step(2, lambda optimizer, **_: groups(optimizer, lr=0.01))]),
        hand(rate=lambda step: 0.01 if step == 2 else RATE),
    ),
    "base rates of the schedule changed by a callback last": (
        built(callbacks=[at_step(1, lower_base_rates)]),  # the schedule had set the second before
        hand(rate=lambda step: RATE if step < 2 else 0.01),
    ),
    "a schedule stepped by a callback is one step ahead": (
        built(lr_scheduler_type="linear", callbacks=[at_step(1, lambda lr_scheduler, **_: lr_scheduler.step())]),
        hand(rate=lambda step: [0.1, 0.05, 0.025, 0.0][step]),
    ),
    "weight decay of a group changed by a callback acts": (
        built(callbacks=[when(on_train_begin=lambda optimizer, **_: groups(optimizer, weight_decay=0.5))]),
        hand(before=decay_by_hand),
    ),
    "gradients changed before the optimizer are those applied": (
        built(callbacks=[when(on_pre_optimizer_step=halve_gradients)]),
        hand(rate=RATE / 2),
    ),
    "gradients clipped by a callback are clipped": (
        built(callbacks=[when(on_pre_optimizer_step=clip)]),
        hand(max_norm=0.01),
    ),
    "a step by hand in a callback adds its gradient where the callback says": (
        built(callbacks=[when(on_pre_optimizer_step=lambda model, **_: model(**EXTRA)["loss"].backward())]),
        hand(before=lambda number, model: model(**EXTRA)["loss"].backward()),
    ),
    "weights clamped after every step stay within": (
        built(callbacks=[when(on_step_end=clamp)]),
        hand(after=lambda number, model: clamp(model)),
    ),
    "weights loaded by a callback are trained on": (
        built(callbacks=[at_step(2, lambda model, **_: model.load_state_dict(Net(seed=7).state_dict()))]),
        hand(after=lambda number, model: model.load_state_dict(Net(seed=7).state_dict()) if number == 2 else None),
    ),
    "a seed set by a callback is that of the next dropout": (
        lambda make: make(
            model=Net(dropout=0.5),
            callbacks=[when(on_step_begin=lambda state, **_: torch.manual_seed(state.global_step))],
        ),
        hand(
            model=lambda: Net(dropout=0.5),
            first=lambda model: torch.manual_seed(0),
            after=lambda number, model: torch.manual_seed(number),
        ),
    ),
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_run_with_a_habit_is_that_of_a_loop_by_hand(make_trainer, habit):
    build, expected = HABITS[habit]
    assert_equals(build(make_trainer), expected)


# Refused


def on(loss):
    return lambda make: losing(loss)(make).train()


class NoWeightsYet(Net):
    def __init__(self):
        super().__init__()
        self.body = nn.LazyLinear(3)


class BuildsNothing(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps):
        pass


class Forgets(Trainer):
    def __init__(self, **parts):
        self.mine = parts


def without_gradients(make):
    with torch.no_grad():
        make().train()


def after(act, **parts):
    return lambda make: then(act, **parts)(make).train()


def closure(make):
    model = Net()
    make(model=model, optimizers=(torch.optim.LBFGS(model.parameters()), None)).train()


REFUSED = {
    # Arguments
    "evaluations asked for after construction without data": (
        after(lambda t: (setattr(t.args, "eval_steps", 2), setattr(t.args, "eval_strategy", "steps"))),
        "eval_dataset",
    ),
    **{
        f"{name}={value!r} set after construction": (after(lambda t, n=name, v=value: setattr(t.args, n, v)), words)
        for name, value, words in (
            ("per_device_train_batch_size", 0, "per_device_train_batch_size"),
            ("logging_steps", -1, "logging_steps"),
            ("lr_scheduler_type", "linaer", "linaer"),
            ("optim", "adamm", "adamm"),
        )
    },
    # Losses
    "a loss for each sample": (on(lambda model, batch: error(model, batch).square()), "only for scalar outputs"),
    "a loss that is a number": (on(lambda model, batch: error(model, batch).square().mean().item()), "float"),
    "a loss without a graph": (on(lambda m, batch: error(m, batch).square().mean().detach()), "does not require grad"),
    "a loss that is nothing": (on(lambda model, batch: None), "NoneType"),
    "a loss that is a pair": (on(lambda model, batch: (error(model, batch).square().mean(), None)), "tuple"),
    "a loss of whole numbers": (on(lambda model, batch: torch.tensor(3)), "does not require grad"),
    # Data
    "an empty list": (lambda make: make(train_dataset=[], max_steps=-1).train(), r"no batch|empty|0 samples"),
    "an empty data set of tensors": (
        lambda make: make(train_dataset=TensorDataset(torch.zeros(0, 4)), max_steps=-1).train(),
        r"no batch|empty|0 samples",
    ),
    "an array as the data, whose rows have no labels": (
        lambda make: make(train_dataset=np.stack([row["x"].numpy() for row in rows()])).train(),
        r"holds no loss, only \['logits'\]; the model was given Tensor. Give it labels",
    ),
    # Models and optimizers
    "a model that was deleted": (after(lambda trainer: delattr(trainer, "model")), "model"),
    "no model for a run": (after(put("model", None)), "trainer.model is None; assign a model"),
    "no model for an evaluation": (lambda make: then(put("model", None))(make).evaluate(rows(4)), "model is None"),
    "a model of half precision with float data": (lambda make: make(model=Net().half()).train(), "dtype"),
    "weights on the meta device": (lambda make: make(model=Net().to("meta")).train(), "meta"),
    "a layer without weights yet": (
        lambda make: make(model=NoWeightsYet()).train(),
        "uninitialized parameter.*Call `forward` with a dummy batch",
    ),
    "a model without anything to train": (after(lambda t: t.model.requires_grad_(False)), r"grad|parameter"),
    "an optimizer that needs a closure": (closure, "closure"),
    "an override that builds no optimizer": (
        lambda make: make(BuildsNothing).train(),
        "left self.optimizer or self.lr_scheduler None; it must set both",
    ),
    # Runs
    "gradients forbidden around training": (without_gradients, "grad"),
    "a run made longer by its state": (
        lambda make: make(callbacks=[at_step(1, lambda state, **_: setattr(state, "max_steps", 6))]).train(),
        r"state.max_steps was raised from 4 to 6 during training",
    ),
    "an attribute that no trainer has": (lambda make: make().no_such_thing, "no_such_thing"),
    "a subclass that forgets super init": (lambda make: make(Forgets).train(), "."),
}


@pytest.mark.parametrize("habit", REFUSED)
def test_a_habit_is_refused_in_words(make_trainer, habit):
    act, words = REFUSED[habit]
    with pytest.raises((AttributeError, ImportError, RuntimeError, TypeError, ValueError), match=words):
        act(make_trainer)
