"""Train through a user's own `accelerate.Accelerator`: its ranks, device, precision, compilation and FSDP2 plugin.

docs/adr/0002-what-accelerate-does.md says what is left to it, and what is not.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Self, cast
from weakref import ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from tr_dist.base import OnRanks, before_clearing, check_trainable, common_options, precision_of
from tr_dist.ddp import DDP
from tr_dist.environment import LaunchEnvironment, rank_device, read_environment
from tr_dist.fsdp.strategy import FSDP, free_gathered
from tr_dist.process_group import ProcessGroup, leave_at_exit
from tr_dist.replica import Replica
from tr_dist.sharded_model import broadcast_values, drop_held, synced_generation

_OF_THE_GROUP = ("backend", "timeout_s", "hang_timeout_s")
_TIMEOUT_S = 1800.0
# An Accelerator on the CPU sets them, and the environment would then describe another launch.
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
# Prefixes that wrappers add to the names of parameters.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class AcceleratorStrategy(OnRanks):
    """A strategy that adopts an `accelerate.Accelerator`, with the plugins that it was built with.

    It trains with the Accelerator's device, ranks, precision (with its loss scaler), `DistributedDataParallelKwargs`
    and `TorchDynamoPlugin`; with `FullyShardedDataParallelPlugin(fsdp_version=2)` the model is sharded by
    `Accelerator.prepare`. The loop itself decides which micro-batch ends a step, and sets `sync_gradients` accordingly.

    It uses the Accelerator's process group, which stays open when the strategy is closed and is destroyed at the exit
    of the process. Constructing it gives an object of one of the two subclasses, for replicas or for shards.

    Attributes:
        accelerator: the argument.
        device, rank, local_rank, world_size: those of the Accelerator.

    Raises:
        ValueError: the Accelerator has a setting that this loop would not follow.
    """

    accelerator: Any
    _bound: Any = None  # what the Accelerator made of the optimizer
    _pair: tuple[ref[nn.Module], ref[nn.Module]] | None = None  # the last result of `prepare`, and what was given

    def __new__(cls, accelerator: Any, **options: Any) -> Self:
        """Return an object of the class for replicas or for shards."""
        if cls is not AcceleratorStrategy:
            return super().__new__(cls)
        _check_plugins(accelerator)
        return cast("Self", object.__new__(AcceleratedShards if accelerator.is_fsdp2 else AcceleratedReplicas))

    def __init__(self, accelerator: Any, *, hang_timeout_s: float | None = None) -> None:
        _check_plugins(accelerator)
        self.accelerator = accelerator
        handler = accelerator.init_handler
        timeout = getattr(handler, "timeout", None) or timedelta(seconds=_TIMEOUT_S)
        OnRanks.__init__(
            self, _environment_of(accelerator), accelerator.device,
            precision="no", backend=None, timeout_s=timeout.total_seconds(), hang_timeout_s=hang_timeout_s,
        )  # fmt: skip
        self._precision.scaler = accelerator.scaler
        leave_at_exit()

    @classmethod
    def from_arguments(cls, args: Any) -> AcceleratorStrategy:
        """Build an `Accelerator` from the launch environment and the training arguments, and adopt it.

        It reads `bf16`, `fp16`, `use_cpu`, `ddp_backend`, `ddp_timeout` and the other `ddp_*` fields. Sharding comes
        from the environment, as `accelerate launch` and `trainer launch` set it.

        Raises:
            ValueError: accelerate is not installed, or the environment does not fit this machine.
        """
        accelerate = _load_accelerate()
        options, precision = common_options(args), precision_of(args)
        joining: dict[str, Any] = {"timeout": timedelta(seconds=options["timeout_s"])}
        group, on_cpu = None, args.use_cpu
        unset = [name for name in _LAUNCH_VARIABLES if name not in os.environ]
        if args.use_cpu or not _has_other_accelerator():
            # The Accelerator takes a group that exists; ours meets where the launcher says, also through a file.
            environment = read_environment()
            device = rank_device(environment, use_cpu=args.use_cpu)
            on_cpu = device.type == "cpu"
            group = ProcessGroup(environment, device, **{k: options[k] for k in _OF_THE_GROUP})
        elif options["backend"]:
            joining["backend"] = options["backend"]
        try:
            strategy = AcceleratorStrategy(
                accelerate.Accelerator(
                    cpu=on_cpu,
                    mixed_precision=None if precision == "no" else precision,
                    kwargs_handlers=[
                        accelerate.DistributedDataParallelKwargs(**_wrapping(args)),
                        accelerate.InitProcessGroupKwargs(**joining),
                    ],
                ),
                hang_timeout_s=options["hang_timeout_s"],
            )
        except BaseException:
            if group is not None:
                group.leave(failed=True)
            raise
        finally:
            for name in unset:
                os.environ.pop(name, None)
        if group is not None:
            group.leave()  # the strategy is in it now
        return strategy

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        if self._pair is not None:
            wrapped, given = (each() for each in self._pair)
            if given is not None and wrapped in (model, getattr(model, "_orig_mod", model)):
                return given
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let the Accelerator know the optimizer, in place of the one that was bound before.

        Raises:
            ValueError: it is what `accelerator.prepare` returned.
        """
        accelerator = self.accelerator
        if type(optimizer).__module__.partition(".")[0] == "accelerate":
            raise ValueError(
                "the optimizer is what accelerator.prepare() returned, which makes a step by its own count of "
                "micro-batches; give the optimizer that was passed to it (its attribute .optimizer)"
            )
        _remove(accelerator._optimizers, self._bound)
        self._bound = accelerator.prepare_optimizer(optimizer, device_placement=False)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Return the context for forward and backward of one micro-batch, and set `accelerator.sync_gradients`."""
        self.accelerator.sync_gradients = sync
        return super().accumulate(model, sync=sync)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the Accelerator's context for a forward pass and its loss."""
        return self.accelerator.autocast()

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients. Returns False if a float16 overflow skipped the step, otherwise True.

        `accelerator.optimizer_step_was_skipped` says the same.
        """
        applied = super().step(optimizer, skip=skip)
        if self._bound is not None:
            self._bound._is_overflow = not applied
        return applied

    def _remember(self, wrapped: nn.Module, given: nn.Module) -> nn.Module:
        self._pair = ref(wrapped), ref(given)
        return wrapped


class AcceleratedReplicas(AcceleratorStrategy, DDP):  # pyright: ignore[reportIncompatibleMethodOverride] - contexts
    """Train one process, or a replica in every process, with an `Accelerator`."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Place, convert and compile the model as the Accelerator does, and wrap it for several processes.

        Collective. The wrapper is a `DistributedDataParallel` with the Accelerator's `DistributedDataParallelKwargs`
        (see `Replica`). Without a launcher there is none.

        Raises:
            ValueError: the model has no trainable parameter, is wrapped already, has no values yet (meta device) or is
                on another accelerator than this rank's; or it was trained already.
        """
        accelerator = self.accelerator
        check_trainable(model, self.device)
        self._refuse_trained(model)
        if "_original_forward" in vars(model):  # it was prepared before, and a second context would go around the first
            accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        vars(model).pop("_is_accelerate_prepared", None)
        _remove(accelerator._models, self._pair and self._pair[0]())
        placed = accelerator.prepare_model(model, evaluation_mode=True)
        if not self._makes_replicas:
            return self._remember(placed, model)
        handler = accelerator.ddp_handler
        replica = Replica(placed, **(handler.to_kwargs() if handler else {}))
        if handler:
            handler.register_comm_hook(replica)
        _remove(accelerator._models, model)
        cast("Any", replica)._is_accelerate_prepared = True
        accelerator.prepare_model(replica)  # only lists it
        self._last = ref(replica)
        return self._remember(replica, model)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Return the context for forward and backward of one micro-batch; without `sync` gradients add up locally."""
        if self._makes_replicas:
            return super().accumulate(model, sync=sync)
        self.accelerator.sync_gradients = sync
        return OnRanks.accumulate(self, model, sync=sync)

    def accumulate_fused(  # pyright: ignore[reportIncompatibleMethodOverride] - a context, of whatever class
        self, model: nn.Module, *, last: bool
    ) -> AbstractContextManager[object]:
        """Return the context for a micro-batch whose gradients the optimizer consumes and averages in backward."""
        if self._makes_replicas:
            return super().accumulate_fused(model, last=last)
        return self.accumulate(model, sync=last)

    @property
    def _makes_replicas(self) -> bool:
        return _kind(self.accelerator) != "NO"


class AcceleratedShards(AcceleratorStrategy, FSDP):  # pyright: ignore[reportIncompatibleMethodOverride] - contexts
    """Train in shards with an `Accelerator` that has a `FullyShardedDataParallelPlugin` for FSDP2.

    The Accelerator shards a model only together with an optimizer, so `prepare` gives it a temporary one: a model that
    is only evaluated is sharded too. An optimizer that was built before gets the shards when it is bound.
    """

    binds_optimizer = True
    _earlier: dict[int, tuple[ref[nn.Parameter], str]]  # parameters before they were sharded, and their names

    def __init__(self, accelerator: Any, *, hang_timeout_s: float | None = None) -> None:
        super().__init__(accelerator, hang_timeout_s=hang_timeout_s)
        plugin, handler = accelerator.state.fsdp_plugin, accelerator.ddp_handler
        self._whole = "FULL" in str(plugin.state_dict_type)
        self._finds_unused = bool(handler and handler.find_unused_parameters)
        self._earlier = {}

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model in place over all ranks, as the plugin says, and return it.

        Collective. Weights are those of rank 0.

        Raises:
            ValueError: the model has no trainable parameter, or is wrapped or sharded already.
        """
        self.check_model(model)
        accelerator = self.accelerator
        rank0_loads = accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
        if not (rank0_loads and self.rank > 0):
            check_trainable(model, self.device)
        if not rank0_loads:
            broadcast_values(model, self.device)
        self._earlier |= {id(p): (ref(p), name) for name, p in model.named_parameters()}
        temporary = torch.optim.SGD([p for p in model.parameters() if p.requires_grad][:1], lr=0.0)
        wrapped, listed = accelerator.prepare(model, temporary)
        _remove(accelerator._optimizers, listed)
        sharded = getattr(wrapped, "_orig_mod", wrapped)
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                cast("nn.Module", module).register_forward_hook(free_gathered)
        if self._finds_unused:
            sharded.set_reduce_scatter_unused_params(True)
        before_clearing(sharded, lambda: drop_held(sharded))
        synced_generation(sharded, self.sum, self.device)
        if callable(getattr(sharded, "generate", None)):
            register_fsdp_forward_method(sharded, "generate")
        self.mesh = _mesh_of(sharded)
        return self._remember(wrapped, model)

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer that was built before `prepare` the shards, and let the Accelerator know it.

        Raises:
            ValueError: such an optimizer has a state already, which is of whole parameters.
        """
        own = {_plain(name): p for name, p in model.named_parameters()}
        shards = {key: own[_plain(name)] for key, (p, name) in self._earlier.items() if p() is not None}
        if any(id(p) in shards and shards[id(p)] is not p for p in optimizer.state):
            raise ValueError(
                f"{type(optimizer).__name__} has a state of whole parameters, and the model is sharded now; give an "
                "optimizer that has made no step"
            )
        for group in optimizer.param_groups:
            group["params"] = [shards.get(id(p), p) for p in group["params"]]
        FSDP.bind_optimizer(self, model, optimizer)
        super().bind_optimizer(model, optimizer)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`: the same one, also from under `torch.compile`."""
        return FSDP.unwrap(self, model)

    def _shards(self) -> Any:
        return self.mesh.get_group(self.mesh.ndim - 1)


def _check_plugins(accelerator: Any) -> None:
    """Refuse an Accelerator with a setting that this loop would not follow, by a `ValueError`."""
    kind, loaders = _kind(accelerator), accelerator.dataloader_config
    sizes = accelerator.parallelism_config
    within = [] if sizes is None else [n for n in ("tp", "cp", "sp") if getattr(sizes, f"{n}_size", 1) > 1]
    wants_shards = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    problems = {
        "a DeepSpeed plugin": (
            kind == "DEEPSPEED",
            "trains by TrainingArguments(deepspeed=plugin.deepspeed_config), which builds the same engine, instead",
        ),
        "Megatron-LM": (kind == "MEGATRON_LM", "has a training loop of its own; use an FSDP2 plugin"),
        "an XLA device": (kind == "XLA", "trains by strategy='xla' instead"),
        "an mps device": (accelerator.device.type == "mps", "trains by strategy='mps' instead"),
        "an FSDP plugin of version 1": (
            kind == "FSDP" and not accelerator.is_fsdp2,
            "is not offered; build the plugin with fsdp_version=2",
        ),
        "an FSDP plugin on the CPU": (
            kind == "MULTI_CPU" and wants_shards,
            "would train whole replicas, because accelerate shards on accelerators only; use strategy='fsdp'",
        ),
        f"a parallelism_config with {', '.join(within)}": (
            bool(within),
            "divides the work on one sample, which is not done here; leave these sizes out",
        ),
        "mixed_precision='fp8'": (accelerator.mixed_precision == "fp8", "is not offered; use 'bf16'"),
        "mixed_precision='fp16'": (
            accelerator.mixed_precision == "fp16" and accelerator.scaler is None,
            "has no effect on this device, which has no loss scaling; use 'bf16' or 'no'",
        ),
        f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps}": (
            accelerator.gradient_accumulation_steps != 1,
            "would divide losses a second time; set it in TrainingArguments (or the loop) only",
        ),
        "split_batches=True": (loaders.split_batches, "does not act on the Trainer's loaders; set the batch size"),
        "dispatch_batches=True": (
            bool(loaders.dispatch_batches),
            "does not act on the Trainer's loaders, of which each reads the samples of its rank; leave it out",
        ),
    }
    for what, (is_so, advice) in problems.items():
        if is_so:
            raise ValueError(f"an Accelerator with {what} {advice}")


def _wrapping(args: Any) -> dict[str, Any]:
    """Return what the `ddp_*` arguments are for `DistributedDataParallelKwargs`."""
    return {
        "find_unused_parameters": bool(args.ddp_find_unused_parameters),
        "broadcast_buffers": args.ddp_broadcast_buffers is not False,
        "static_graph": bool(args.ddp_static_graph),
        **({} if args.ddp_bucket_cap_mb is None else {"bucket_cap_mb": args.ddp_bucket_cap_mb}),
    }


def _has_other_accelerator() -> bool:
    """Whether this machine computes on what only accelerate knows: neither CUDA nor the CPU."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current is not None and current.type not in ("cuda", "cpu")


def _kind(accelerator: Any) -> str:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def _environment_of(accelerator: Any) -> LaunchEnvironment:
    """Return where the Accelerator found this process; alone it has no launcher to be asked again."""
    return LaunchEnvironment(
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        local_rank=max(accelerator.local_process_index, 0),
        local_world_size=None,
        node_rank=None,
    )


def _load_accelerate() -> Any:
    try:
        return importlib.import_module("accelerate")
    except ImportError as error:
        raise ValueError(
            f"strategy='accelerate' needs accelerate, which cannot be imported ({error}): pip install "
            "'tr-dist[accelerate]'"
        ) from error


def _remove(objects: list[Any], one: Any) -> None:
    """Take an object off one of the Accelerator's lists, if it is there."""
    objects[:] = [each for each in objects if each is not one]


def _plain(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name


def _mesh_of(model: nn.Module) -> DeviceMesh:
    return next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
