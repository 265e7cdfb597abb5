"""Hold the settings of `fsdp` and `fsdp_config`, refuse unsupported ones, and choose the modules they divide."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

SHARDINGS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCHES = ("backward_pre", "backward_post", "no_prefetch")
_STATES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")

# Fixed settings. key -> (the value that applies, why the other is not supported)
_AS_IT_IS: dict[str, tuple[Any, str]] = {
    "use_orig_params": (
        True,
        "parameters always keep their names, by which they are grouped, saved and resumed with other strategies",
    ),
    "limit_all_gathers": (
        True,
        "at most two layers' parameters are ever gathered at once",
    ),
}
_XLA = ("xla", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2")


@dataclass(frozen=True)
class Sharding:
    """How a model is divided over the ranks.

    Attributes:
        strategy: `full_shard` divides parameters, gradients and optimizer state, and gathers a layer's parameters
            whenever it computes; `shard_grad_op` keeps them gathered from forward to backward; `no_shard` replicates
            everything; `hybrid_shard` and `hybrid_shard_zero2` are the first two within each machine, with equal
            shards on all machines.
        wrap: `TRANSFORMER_BASED_WRAP` makes units of the modules whose classes `layer_classes` names, or the model's
            `_no_split_modules`; `SIZE_BASED_WRAP` of modules of `min_num_params` parameters; `NO_WRAP` one of all.
        layer_classes: names of classes.
        min_num_params: number of parameters.
        offload: keep shards, and make updates, in host memory.
        backward_prefetch: when the backward pass gathers the next unit: `backward_pre` before it computes, the others
            when it is needed.
        forward_prefetch: the forward pass gathers the next unit before it computes.
        sync_module_states: copy the weights of rank 0 to every rank.
        rank0_loads: only rank 0 has the weights; other ranks' may be on the meta device.
        replicas: the number of groups of ranks over which `hybrid_shard` repeats the shards; None is one for each
            machine.

    Raises:
        ValueError: a value is not known, or two contradict each other.
    """

    strategy: str = "full_shard"
    wrap: str = "NO_WRAP"
    layer_classes: tuple[str, ...] = ()
    min_num_params: int = 0
    offload: bool = False
    backward_prefetch: str = "backward_pre"
    forward_prefetch: bool = False
    sync_module_states: bool = True
    rank0_loads: bool = False
    replicas: int | None = None

    def __post_init__(self) -> None:
        choices = (("strategy", self.strategy, SHARDINGS), ("wrap", self.wrap, POLICIES))
        for name, value, known in (*choices, ("backward_prefetch", self.backward_prefetch, _PREFETCHES)):
            if value not in known:
                raise ValueError(f"fsdp: {name}={value!r} is not known; it is one of {', '.join(known)}")
        if self.wrap == "SIZE_BASED_WRAP" and self.min_num_params < 1:
            raise ValueError("fsdp: wrap by size needs min_num_params, the parameters that make a unit, from 1")
        if self.replicas is not None and not self.strategy.startswith("hybrid"):
            raise ValueError(
                f"fsdp: replicas={self.replicas} repeats the shards, and {self.strategy!r} does not; use 'hybrid_shard'"
            )
        if self.rank0_loads and not self.sync_module_states:
            raise ValueError(
                "fsdp: cpu_ram_efficient_loading has rank 0 alone hold the weights, and sync_module_states=False would "
                "leave the others without; leave one of them out"
            )

    def mesh_shape(self, world_size: int, local_world_size: int | None) -> tuple[int, int]:
        """Return the number of replicas, and of shards in each.

        Args:
            world_size: number of processes.
            local_world_size: number of them on this machine; None means all.

        Raises:
            ValueError: machines would hold equal shards, but have unequal numbers of processes.
        """
        if self.strategy == "no_shard":
            return world_size, 1
        if not self.strategy.startswith("hybrid"):
            return 1, world_size
        if self.replicas is not None:
            if world_size % self.replicas:
                raise ValueError(
                    f"fsdp: {world_size} processes are not a multiple of the {self.replicas} replicas "
                    "(dp_replicate_size); start as many as replicas times shards"
                )
            return self.replicas, world_size // self.replicas
        local = local_world_size or world_size
        if world_size % local:
            raise ValueError(
                f"fsdp={self.strategy!r} needs as many processes on every machine, and a total of {world_size} is not "
                f"a multiple of the {local} here"
            )
        return world_size // local, local

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a unit's parameters are freed after its forward."""
        return self.strategy in ("full_shard", "hybrid_shard")

    @classmethod
    def from_config(
        cls, options: Collection[str], config: Mapping[str, Any], sizes: Mapping[str, int] | None = None
    ) -> Sharding:
        """Build from the words of `fsdp`, the keys of `fsdp_config` without prefix, and those of `parallelism_config`.

        Raises:
            ValueError: they contradict each other, or are not supported; the message gives an alternative.
        """
        refuse(config)
        chosen = [option for option in options if option in SHARDINGS]
        strategy = config.get("sharding_strategy", chosen[0] if chosen else "full_shard")
        if chosen and strategy != chosen[0]:
            raise ValueError(
                f"fsdp={chosen[0]!r} and fsdp_config's sharding_strategy={strategy!r} differ; give one of them"
            )
        strategy, replicas = _repeated(_resharding(strategy, config), sizes or {})
        return cls(
            strategy=strategy,
            replicas=replicas,
            wrap=_wrap(options, config),
            layer_classes=tuple(config.get("transformer_layer_cls_to_wrap", ())),
            min_num_params=config.get("min_num_params", 0),
            offload="offload" in options or config.get("cpu_offload", False),
            backward_prefetch=config.get("backward_prefetch", "backward_pre"),
            forward_prefetch=config.get("forward_prefetch", False),
            sync_module_states=config.get("sync_module_states", True),
            rank0_loads=config.get("cpu_ram_efficient_loading", False),
        )


def refuse(config: Mapping[str, Any]) -> None:
    """Raise for keys of features that FSDP2 does not have.

    Raises:
        ValueError: the message names the key and what to do.
    """
    if xla := [key for key in _XLA if config.get(key)]:
        raise ValueError(f"fsdp_config has {xla[0]}, which is for TPUs; set strategy='xla', or leave it out")
    if config.get("version") == 1:
        raise ValueError(
            "fsdp_config: version=1 is torch's former FSDP, which is not offered; leave it out or set version=2: FSDP2 "
            "trains to the same numbers"
        )
    for key, (value, reason) in _AS_IT_IS.items():
        if config.get(key, value) != value:
            raise ValueError(f"fsdp_config: {key}={config[key]!r} is not supported: {reason}; leave it out")
    state = config.get("state_dict_type")
    if state is not None and state not in _STATES:
        raise ValueError(f"fsdp_config: state_dict_type={state!r} is not known; it is one of {', '.join(_STATES)}")


def _resharding(strategy: str, config: Mapping[str, Any]) -> str:
    """Return the strategy after applying FSDP2's own key `reshard_after_forward`."""
    reshards = config.get("reshard_after_forward")
    if reshards is None:
        return strategy
    pairs = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
    if reshards and strategy in pairs.values():
        raise ValueError(
            f"fsdp: {strategy!r} keeps parameters after the forward pass, and fsdp_config's reshard_after_forward=True "
            "lets them go; give one of them"
        )
    return strategy if reshards else pairs.get(strategy, strategy)


def _repeated(strategy: str, sizes: Mapping[str, int]) -> tuple[str, int | None]:
    """Return the strategy after applying the sizes of `parallelism_config`, and its number of replicas."""
    replicas, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    if strategy == "no_shard" and shards > 1:
        raise ValueError(
            f"fsdp='no_shard' divides nothing, and parallelism_config's dp_shard_size={shards} divides the model; use "
            "fsdp='full_shard', or leave dp_shard_size out"
        )
    if strategy == "no_shard" or not sizes:
        return strategy, None
    repeated = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}
    if replicas == 1:
        return strategy, (1 if strategy.startswith("hybrid") else None)
    return repeated.get(strategy, strategy), replicas


def _wrap(options: Collection[str], config: Mapping[str, Any]) -> str:
    policy = config.get("auto_wrap_policy")
    by_size, by_class = config.get("min_num_params", 0) > 0, bool(config.get("transformer_layer_cls_to_wrap"))
    if policy == "NO_WRAP" and (by_size or by_class):
        raise ValueError(
            "fsdp_config: auto_wrap_policy='NO_WRAP' leaves nothing for transformer_layer_cls_to_wrap or "
            "min_num_params to do; leave it or them out"
        )
    if policy is not None:
        return str(policy)
    if by_size:
        return "SIZE_BASED_WRAP"
    return "TRANSFORMER_BASED_WRAP" if by_class or "auto_wrap" in options else "NO_WRAP"


def choose_units(model: nn.Module, sharding: Sharding) -> list[nn.Module]:
    """Return the modules that become units, inner ones first, without the model itself.

    A module that shares a parameter with a module outside it cannot be a unit: the parameter would be in two units. It
    stays part of the enclosing unit.

    Raises:
        ValueError: a named class is not in the model.
    """
    if sharding.wrap == "TRANSFORMER_BASED_WRAP":
        chosen = _of_classes(model, sharding.layer_classes or _own_layers(model))
    elif sharding.wrap == "SIZE_BASED_WRAP":
        chosen = _of_size(model, sharding.min_num_params)
    else:
        chosen = []
    shared = _shared_parameters(model)
    return [module for module in chosen if not _reaches_outside(module, shared)]


def _own_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the layer classes that a transformers model marks as not to be split."""
    names = getattr(model, "_no_split_modules", None)
    if not names:
        raise ValueError(
            f"fsdp: auto_wrap does not know the layers of {type(model).__name__}, which has no _no_split_modules; name "
            "their class in fsdp_config's transformer_layer_cls_to_wrap, or a size in min_num_params. It has modules "
            f"of the classes {_class_names(model)}"
        )
    found = {type(module).__name__ for module in model.modules()}
    return tuple(name for name in names if name in found)


def _of_classes(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    modules = [module for _, module in _inner_first(model) if _class_name(module) in names]
    missing = sorted(set(names) - {_class_name(module) for module in modules})
    if missing:
        raise ValueError(
            f"fsdp_config: transformer_layer_cls_to_wrap names {', '.join(missing)}, and {type(model).__name__} has no "
            f"module of that class; it has {_class_names(model)}"
        )
    return modules


def _of_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return modules with at least so many parameters that are in no unit yet."""
    chosen: list[nn.Module] = []
    taken: set[int] = set()
    for name, module in _inner_first(model):
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if name and sum(own.values()) >= least and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            chosen.append(module)
            taken |= own.keys()
    return chosen


def _inner_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, after its submodules; the model itself is last."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child_name, child in module.named_children():
            if id(child) not in seen:
                seen.add(id(child))
                yield from walk(f"{name}.{child_name}" if name else child_name, child)
        yield name, module

    yield from walk("", model)


def _shared_parameters(model: nn.Module) -> dict[int, set[int]]:
    """Return, for each parameter that several modules hold, those modules, all by identity."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    return {parameter: modules for parameter, modules in owners.items() if len(modules) > 1}


def _reaches_outside(module: nn.Module, shared: dict[int, set[int]]) -> bool:
    inside = {id(each) for each in module.modules()}
    return any(not shared.get(id(p), set()) <= inside for p in module.parameters())


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _class_names(model: nn.Module) -> str:
    names = {_class_name(m) for m in model.modules() if m is not model and any(True for _ in m.children())}
    return ", ".join(sorted(names or {_class_name(m) for m in model.modules()}))
