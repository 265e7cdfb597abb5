"""Put back everything that a trial of a Trainer touches, so that training afterwards gives the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tr_core.callback import CallbackList
from tr_core.checks import overrides_loader
from tr_core.preflight.data_state import keep_data
from tr_core.randomness import RandomState
from tr_core.step_scope import StepScope

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


@contextmanager
def preserved(trainer: Trainer) -> Iterator[None]:
    """Run a block that may go forward and backward and build an optimizer, and leave no trace of it.

    Put back are random number generators, gradients, buffers, the mode of every module, the attributes of modules and
    of the Trainer, its state and control, hooks on parameters, and what data sets and collators hold. Weights
    are copied only where a given optimizer applies gradients during backward: nothing else here changes them.
    Callbacks are not called inside. The model must have been handed to its strategy before.
    """
    random_state = RandomState(trainer.strategy.device)
    generators = random_state.state_dict()
    undo = [_keep_trainer(trainer), _keep_modules(trainer), _keep_parameters(trainer), _keep_data(trainer)]
    trainer.callback_handler, trainer.scope = CallbackList(trainer), StepScope()
    trainer.chosen = copy.copy(trainer.chosen)
    trainer.model_wrapped.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for put_back in reversed(undo):
            put_back()
        random_state.load_state_dict(generators)


def _keep_trainer(trainer: Trainer) -> Any:
    attributes, args = dict(vars(trainer)), dict(vars(trainer.args))
    rule = dict(vars(trainer.loss_rule))
    state, control, loaders = copy.deepcopy(trainer.state), copy.copy(trainer.control), dict(trainer.loaders)

    def put_back() -> None:
        vars(trainer).clear()
        vars(trainer).update(attributes)
        vars(trainer.args).clear()
        vars(trainer.args).update(args)
        vars(trainer.loss_rule).update(rule)
        vars(trainer.state).update(vars(state))
        vars(trainer.control).update(vars(control))
        trainer.loaders.clear()
        trainer.loaders.update(loaders)

    return put_back


def _keep_modules(trainer: Trainer) -> Any:
    kept = []
    # What a strategy wraps around the model has a state of its own; the mode is all that a trial changes there.
    modes = [(module, module.training) for module in trainer.model_wrapped.modules()]
    for module in trainer.model.modules():
        registries = {name: dict(value) for name, value in vars(module).items() if isinstance(value, dict)}
        buffers = {name: None if b is None else b.detach().clone() for name, b in module._buffers.items()}
        kept.append((module, dict(vars(module)), registries, buffers))

    def put_back() -> None:
        for module, attributes, registries, buffers in kept:
            for name in set(vars(module)) - set(attributes):
                del vars(module)[name]
            vars(module).update(attributes)
            for name, registry in registries.items():
                held = vars(module)[name]
                held.clear()
                held.update(registry)
            for name, value in buffers.items():
                buffer = module._buffers[name]
                if buffer is not None and value is not None:
                    with torch.no_grad():
                        buffer.copy_(value)
        for module, mode in modes:
            module.training = mode

    return put_back


def _keep_parameters(trainer: Trainer) -> Any:
    parameters = list(trainer.model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    hooks = [_hook_tables(parameter) for parameter in parameters]
    acts_in_backward = getattr(trainer.optimizer, "fused_in_backward", False)
    weights = [p.detach().clone() for p in parameters] if acts_in_backward else []

    def put_back() -> None:
        for parameter, gradient, tables in zip(parameters, gradients, hooks, strict=True):
            parameter.grad = gradient
            for name, table in _hook_tables(parameter).items():
                for number in set(table) - set(tables.get(name, ())):
                    del getattr(parameter, name)[number]
        for parameter, weight in zip(parameters, weights, strict=False):
            with torch.no_grad():
                parameter.copy_(weight)

    return put_back


def _hook_tables(parameter: nn.Parameter) -> dict[str, dict[int, Any]]:
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return {name: dict(table) for name in names if (table := getattr(parameter, name, None))}


def _keep_data(trainer: Trainer) -> Any:
    evaluated = trainer.eval_dataset
    sets = evaluated.values() if isinstance(evaluated, dict) else (evaluated,)
    own = vars(trainer).values() if overrides_loader(trainer) else ()
    generators = [value for value in own if isinstance(value, torch.Generator)]
    undo = keep_data([trainer.train_dataset, *sets, trainer.data_collator, *generators])

    def put_back() -> None:
        for restore in undo:
            restore()

    return put_back
