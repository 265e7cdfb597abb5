"""Recompute activations in the backward pass inside a block, so that they are not kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from tr_core.signatures import parameters_of, takes_argument

# Methods that switch checkpointing on in transformers' models. The second is the older name of the first.
_ENABLING = (
    ("activation_checkpointing_enable", "activation_checkpointing_kwargs"),
    ("gradient_checkpointing_enable", "gradient_checkpointing_kwargs"),
)
_FLAGS = ("gradient_checkpointing", "_gradient_checkpointing_func")
_INPUT_HOOKS = ("_require_grads_hooks", "_require_grads_hook")


@contextmanager
def checkpointed_activations(
    model: nn.Module, device: torch.device, options: Mapping[str, Any] | None = None
) -> Iterator[list[str]]:
    """Checkpoint the activations of a model within the block, and restore the model afterwards.

    A model with `activation_checkpointing_enable` or `gradient_checkpointing_enable` is switched by that method. In any
    other model the repeated layers are checkpointed (see `repeated_layers`); names and modules do not change. Gradients
    are bit for bit those without checkpointing, dropout included.

    Args:
        model: the unwrapped model.
        device: where it computes.
        options: those of `torch.utils.checkpoint.checkpoint`, with `use_reentrant` False by default. Two more:
            `every_n_layers` checkpoints only every n-th layer; `offload` keeps the tensors needed for recomputation in
            host memory.

    Returns:
        Names of the checkpointed layers; none where the model decides.
    """
    settings = check_checkpointing_options(options)
    every, offload = settings.pop("every_n_layers"), settings.pop("offload")
    with ExitStack() as undo:
        for name, keyword in _ENABLING:
            if callable(enable := getattr(model, name, None)):
                undo.enter_context(_flags_put_back(model, name))
                extra = {"every_n_layers": every} if every != 1 else {}
                # On a CPU they are in host memory already, and transformers would pin memory.
                extra |= {"offload": True} if offload and device.type != "cpu" else {}
                _enable(enable, keyword, _counting_once(model, settings), extra, is_requested=bool(options))
                yield []
                return
        layers = repeated_layers(model)
        if not layers:
            raise ValueError(_nothing(model))
        chosen = list(layers)[::every]
        for name in chosen:
            layer = layers[name]
            undo.enter_context(_checkpointed(layer, _counting_once(layer, settings), device.type if offload else None))
        yield chosen


def check_checkpointing_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options with their defaults.

    Raises:
        ValueError: an option is unknown, or `every_n_layers` is not a whole number of at least 1.
    """
    takes = set(parameters_of(checkpoint)) - {"function", "args", "kwargs", "context_fn"}
    known = sorted(takes | {"preserve_rng_state", "every_n_layers", "offload"})
    if unknown := sorted(set(options or {}) - set(known)):
        raise ValueError(f"activation_checkpointing_kwargs has {unknown}, which are not known; it takes {known}")
    settings = {"use_reentrant": False, "every_n_layers": 1, "offload": False, **(options or {})}
    every = settings["every_n_layers"]
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            f"activation_checkpointing_kwargs has every_n_layers={every!r}; it needs a whole number from 1"
        )
    return settings


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated layers of a model, the members of its stacks, by name.

    A stack is an `nn.ModuleList` or `nn.Sequential` of at least two modules of one type with parameters, outside any
    other stack. Stacks of single operations, such as several `nn.Linear`, count only without any other stack.
    """
    layers = {name: layer for stack in _stacks("", model) for name, layer in stack.items()}
    made_of_parts = {name: layer for name, layer in layers.items() if any(True for _ in layer.children())}
    seen: set[int] = set()
    unique = {}
    for name, layer in (made_of_parts or layers).items():
        if id(layer) not in seen:  # one module may be listed several times
            seen.add(id(layer))
            unique[name] = layer
    return unique


def _stacks(path: str, module: nn.Module) -> Iterator[dict[str, nn.Module]]:
    prefix = f"{path}." if path else ""
    members = {prefix + name: child for name, child in module._modules.items() if child is not None}
    types = {type(member) for member in members.values()}
    has_parameters = any(True for _ in module.parameters())
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(members) > 1 and len(types) == 1 and has_parameters:
        yield members
        return
    for name, member in members.items():
        yield from _stacks(name, member)


@contextmanager
def _checkpointed(layer: nn.Module, settings: dict[str, Any], offloaded_from: str | None) -> Iterator[None]:
    # Replaces the class, not the object's method: a copy of the layer then computes with its own weights.
    before = type(layer)
    layer.__class__ = _checkpointing_class(before, settings, offloaded_from)
    try:
        yield
    finally:
        layer.__class__ = before


def _checkpointing_class(base: type[Any], settings: dict[str, Any], offloaded_from: str | None) -> type[Any]:
    def storage() -> AbstractContextManager[object]:
        if offloaded_from is None:
            return nullcontext()
        return save_on_cpu(pin_memory=offloaded_from == "cuda", device_type=offloaded_from)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return base.forward(self, *args, **kwargs)
        if settings["use_reentrant"]:
            _check_reentrant(self, args, kwargs)
        with storage():
            return checkpoint(partial(base.forward, self, **kwargs), *args, **settings)

    members = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), members)


def _check_reentrant(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def needs_gradient(values: Any) -> bool:
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)

    if needs_gradient(kwargs.values()) or not needs_gradient(args):
        raise ValueError(
            f"use_reentrant=True would lose gradients of {type(layer).__name__}: it needs an input that requires a "
            "gradient, and all such by position; leave use_reentrant out of activation_checkpointing_kwargs"
        )


def _enable(
    enable: Callable[..., Any], keyword: str, settings: dict[str, Any], extra: dict[str, Any], *, is_requested: bool
) -> None:
    """Switch checkpointing on in a model, with the options that its method takes."""
    arguments = {keyword: settings, **extra}
    refused = [name for name in arguments if not takes_argument(enable, name)]
    if refused and is_requested:
        raise ValueError(
            f"activation_checkpointing_kwargs cannot be passed on: {getattr(enable, '__qualname__', enable)} takes no "
            f"{' and no '.join(refused)}; leave activation_checkpointing_kwargs out"
        )
    enable(**{name: value for name, value in arguments.items() if name not in refused})


@contextmanager
def _flags_put_back(model: nn.Module, enabling: str) -> Iterator[None]:
    """Restore the checkpointing flags of a transformers model after the block; switch off any other model's."""
    names = (*_FLAGS, *_INPUT_HOOKS)
    noted = [(module, {n: vars(module)[n] for n in names if n in vars(module)}) for module in model.modules()]
    try:
        yield
    finally:
        changed = False
        for module, before in noted:
            for hook in vars(module).get(_INPUT_HOOKS[0], ()):
                if hook not in before.get(_INPUT_HOOKS[0], ()):
                    hook.remove()
            for name in names:
                if vars(module).get(name) is not before.get(name):
                    changed = True
                    setattr(module, name, before[name]) if name in before else delattr(module, name)
        disable = getattr(model, enabling.replace("enable", "disable"), None)
        if not changed and callable(disable):
            disable()


def _counting_once(module: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with which a batch counts once in running statistics, though it is computed twice.

    Raises:
        ValueError: checkpointing is reentrant, which has no such setting.
    """
    tracking = [part for part in module.modules() if getattr(part, "track_running_stats", False)]
    if not tracking:
        return settings
    if settings["use_reentrant"]:
        raise ValueError(
            f"use_reentrant=True would count every batch twice in the running statistics of {type(module).__name__}; "
            "leave it out of activation_checkpointing_kwargs"
        )
    return {**settings, "context_fn": lambda: (nullcontext(), _statistics_kept(tracking))}


@contextmanager
def _statistics_kept(tracking: list[nn.Module]) -> Iterator[None]:
    """Redirect the running statistics of modules to copies, which are dropped."""
    originals = [(module, dict(module._buffers)) for module in tracking]
    for module, buffers in originals:
        module._buffers.update({name: value if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in originals:
            module._buffers.update(buffers)


def _nothing(model: nn.Module) -> str:
    return (
        f"activation_checkpointing=True, but {type(model).__name__} has nothing to checkpoint: neither "
        "activation_checkpointing_enable() nor an nn.ModuleList or nn.Sequential of layers of one type; call "
        "torch.utils.checkpoint.checkpoint in its forward, or leave activation_checkpointing out"
    )
