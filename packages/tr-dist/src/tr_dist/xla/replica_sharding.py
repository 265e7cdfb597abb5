"""Give every replica a part of each parameter (`XlaFullyShardedDataParallel`), and save full state dicts.

It also moves modules and states to an XLA device and back to the host.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tr_dist.xla.library import Library


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to an XLA device; parameters and buffers that modules share stay shared.

    Moving replaces every tensor, because a host tensor cannot become an XLA tensor.
    """
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((held, name))
    model = model.to(device)
    for (first, first_name), *others in places.values():
        for held, name in others:
            held[name] = first[first_name]
    return model


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict with tensors in host memory; parameters that modules share are one tensor."""
    state = module.state_dict(keep_vars=True)  # the tensors themselves, to find shared ones
    moved = to_host(state)
    if hasattr(state, "_metadata"):
        moved._metadata = state._metadata  # pyright: ignore[reportAttributeAccessIssue]
    return moved


def to_host(tree: Any) -> Any:
    """Return dicts, lists and tuples with their tensors copied to the host, all at once."""
    found: dict[int, torch.Tensor] = {}
    _walk(tree, lambda tensor: found.setdefault(id(tensor), tensor))
    on_device = {key: tensor.detach() for key, tensor in found.items() if tensor.device.type == "xla"}
    # Copied one by one, each tensor on several devices would need a program to be compiled.
    fetched = importlib.import_module("torch_xla")._XLAC._xla_get_cpu_tensors(
        list(on_device.values())
    )  # sync: in saves
    copies = dict(zip(on_device, fetched, strict=True))
    return _walk(tree, lambda tensor: copies[id(tensor)] if id(tensor) in copies else tensor.detach().clone())


def _walk(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        kind = OrderedDict if isinstance(tree, OrderedDict) else dict
        return kind((key, _walk(value, function)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(_walk(value, function) for value in tree)
    return tree


_SETTINGS = (
    "reshard_after_forward",
    "execute_sharding_on_init",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
    "sync_on_finalization",
    "disable_reshard_on_root",
    "compute_dtype",
    "buffer_dtype",
    "fp32_reduce_scatter",
    "pin_layout_in_collective_ops",
    "reduce_scatter_bucket_size_mb",
)
_DTYPE_NAMES = {
    f"{prefix}{name}": getattr(torch, name) for prefix in ("", "torch.") for name in ("float32", "bfloat16")
}


def read_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `XlaFullyShardedDataParallel` that `xla_fsdp_settings` gives.

    Raises:
        ValueError: one is unknown, or would flatten parameters.
    """
    settings = dict(given)
    if settings.pop("flatten_parameters", False) or not settings.pop("shard_param_on_dim_0", True):
        raise ValueError(
            "xla_fsdp_settings: flatten_parameters=True and shard_param_on_dim_0=False take their shapes from "
            "parameters, by which optimizers and checkpoints know them; leave them out"
        )
    if unknown := sorted(set(settings) - set(_SETTINGS)):
        raise ValueError(f"xla_fsdp_settings: {', '.join(unknown)} cannot be set; it takes {', '.join(_SETTINGS)}")
    for name in ("compute_dtype", "buffer_dtype"):
        value = settings.get(name)
        if value is not None:
            if str(value) not in _DTYPE_NAMES:
                raise ValueError(f"xla_fsdp_settings: {name}={value!r} is not known; it is 'float32' or 'bfloat16'")
            settings[name] = _DTYPE_NAMES[str(value)]
    return {"shard_param_on_dim_0": True, **settings}


class ReplicaSharding:
    """A model whose parameters are divided by rows over replicas, and gathered when they compute.

    Args:
        library: torch_xla.
        settings: keyword arguments, as `read_settings` returns them.

    Raises:
        ValueError: a setting is not supported.
    """

    def __init__(self, library: Library, settings: Mapping[str, Any]) -> None:
        self._library, self._settings = library, read_settings(settings)
        self._rank, self._world_size = library.runtime.global_ordinal(), library.runtime.world_size()

    def wrap(self, model: nn.Module, units: Sequence[nn.Module], *, recomputes: bool) -> nn.Module:
        """Divide a model and return the module to call instead.

        The model's own parameters are the parts from then on, under their names; do not call it directly.
        """
        fsdp = importlib.import_module("torch_xla.distributed.fsdp")
        chosen = {id(unit) for unit in units}
        places = _places(model)

        def policy(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
            return recurse or id(module) in chosen

        def make(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
            module = fsdp.checkpoint_module(module) if recomputes else module
            return fsdp.XlaFullyShardedDataParallel(module, *args, **options)

        root = fsdp.XlaFullyShardedDataParallel(
            model, auto_wrap_policy=policy, auto_wrapper_callable=make, **self._settings
        )
        for part in root.modules():
            if isinstance(part, fsdp.XlaFullyShardedDataParallel):
                _return_parameters(part)
        vars(root)["original"], vars(root)["places"] = (model,), places  # not registered as submodules

        def check_called_within(module: nn.Module, args: Any) -> None:
            if not root.has_full_params:
                raise RuntimeError(
                    f"{type(module).__name__} is divided over replicas and was called itself, as generate() does; call "
                    "what prepare() returned, or divide it with xla_fsdp_v2=True, under which it can generate"
                )

        model.register_forward_pre_hook(check_called_within)
        return root

    def norm(self, local: torch.Tensor) -> torch.Tensor:
        """Return the norm of all replicas' parts, given that of this one's."""
        if self._world_size == 1:
            return local
        return self._library.model.all_reduce("sum", local.square()).sqrt()

    def model_state(self, root: Any) -> dict[str, Any]:
        """Return the full state dict of the model, in host memory."""
        state: dict[str, Any] = OrderedDict()
        copies: dict[int, torch.Tensor] = {}
        for name, (owner, key) in root.places.items():
            tensor = _held(owner, key)
            if id(tensor) not in copies:
                copies[id(tensor)] = self._whole(tensor.detach(), getattr(tensor, "_orig_size", None))
            state[name] = copies[id(tensor)]
        for name, tensor in to_host(state).items():
            state[name] = tensor.to(getattr(_held(*root.places[name]), "_orig_dtype", tensor.dtype))
        return _shared_again(state, root.places)

    def load_model_state(self, root: Any, state: Mapping[str, Any]) -> None:
        """Load a full state dict; each replica takes its part.

        Raises:
            RuntimeError: names or shapes differ.
        """
        names = set(root.places)
        if names != set(state):
            lacking, unknown = sorted(names - set(state)), sorted(set(state) - names)
            raise RuntimeError(f"the state lacks {lacking} and has {unknown}, which the model has not")
        with torch.no_grad():
            for name, (owner, key) in root.places.items():
                tensor, size = _held(owner, key), getattr(_held(owner, key), "_orig_size", None)
                if (size or tensor.shape) != state[name].shape:
                    raise RuntimeError(
                        f"{name} is of shape {tuple(state[name].shape)}, not {tuple(size or tensor.shape)}"
                    )
                tensor.copy_(self._part(state[name], size).to(tensor.device))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for full parameters, in host memory."""
        return to_host(self._with_states(optimizer, optimizer.state_dict(), self._whole_of))

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load this replica's part of a full optimizer state."""
        optimizer.load_state_dict(self._with_states(optimizer, state, self._part_of))

    def _with_states(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], change: Any) -> dict[str, Any]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        changed = {
            number: {name: change(value, parameters[number]) for name, value in held.items()}
            for number, held in state["state"].items()
        }
        return {**state, "state": changed}

    def _whole_of(self, value: Any, parameter: Any) -> Any:
        is_divided = isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
        return self._whole(value, parameter._orig_size) if is_divided else value

    def _part_of(self, value: Any, parameter: Any) -> Any:
        is_whole = isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter._orig_size
        return self._part(value, parameter._orig_size) if is_whole else value

    def _whole(self, tensor: torch.Tensor, size: torch.Size | None) -> torch.Tensor:
        if size is None:
            return tensor
        if self._world_size > 1:
            tensor = self._library.model.all_gather(tensor, dim=0)
        return tensor[: size[0]]

    def _part(self, tensor: torch.Tensor, size: torch.Size | None) -> torch.Tensor:
        return tensor if size is None else part_of_rows(tensor, self._rank, self._world_size)


def part_of_rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return a replica's rows of a tensor, padded with rows of zeros to equal sizes."""
    rows = -(-tensor.shape[0] // world_size)
    mine = tensor[rank * rows : (rank + 1) * rows]
    missing = rows - mine.shape[0]
    return torch.cat([mine, mine.new_zeros(missing, *tensor.shape[1:])]) if missing else mine


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return, by name in the state dict, the module that holds each tensor, and the tensor's name there."""
    places = {}
    for name in model.state_dict():
        path, _, key = name.rpartition(".")
        places[name] = (model.get_submodule(path), key)
    return places


def _held(owner: nn.Module, key: str) -> Any:
    return owner._parameters[key] if key in owner._parameters else owner._buffers[key]


def _return_parameters(wrapper: Any) -> None:
    """Register a wrapper's parts with the modules whose parameters they are, instead of with the wrapper.

    A module computes with the full parameter, an attribute that is not registered.
    """
    for (_, owner, name), part in zip(wrapper.full_param_infos, wrapper.sharded_params, strict=True):
        owner._parameters[name] = part
        wrapper._parameters.pop(part._name)
    for _, _, owner, name, first, first_name in wrapper.shared_full_param_infos:
        owner._parameters[name] = first._parameters[first_name]


def _shared_again(state: dict[str, Any], places: Mapping[str, tuple[nn.Module, str]]) -> dict[str, Any]:
    """Share tensors again that belong to one parameter."""
    first: dict[int, torch.Tensor] = {}
    for name, (owner, key) in places.items():
        state[name] = first.setdefault(id(_held(owner, key)), state[name])
    return state
