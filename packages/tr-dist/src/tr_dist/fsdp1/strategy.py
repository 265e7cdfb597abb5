"""Train one model in flattened shards: torch's `FullyShardedDataParallel`, with what it gets wrong kept away."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy

from tr_dist.device import rank_device
from tr_dist.environment import read_environment
from tr_dist.fsdp.placing import broadcast_values
from tr_dist.fsdp.settings import Sharding
from tr_dist.fsdp.units import choose_units
from tr_dist.fsdp1.places import Piece, Places, pieces_of
from tr_dist.fsdp1.states import FlatModel, FlatOptimizer, whole_state
from tr_dist.fsdp1.use import Use
from tr_dist.generating import generate_together
from tr_dist.on_device import scale_to, total_norm
from tr_dist.ranks import Ranks, options_of
from tr_dist.replica import check_trainable

_PREFETCH = {
    "backward_pre": fsdp.BackwardPrefetch.BACKWARD_PRE,
    "backward_post": fsdp.BackwardPrefetch.BACKWARD_POST,
    "no_prefetch": None,
}
# Torch's optimizers that change each number by its own gradients alone, so that flattening changes nothing.
_BY_NUMBER = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


class FSDP1(Ranks):
    """Fully sharded data parallel training by `FullyShardedDataParallel`, for what `fully_shard` does not have.

    That is: `no_shard` and `shard_grad_op` as they were, prefetching by position (`backward_post`), and gathering
    without a limit. The calls and the numbers are those of `tr_dist.fsdp.FSDP`, and so are checkpoints, which either
    resumes. Differences: parameters are this rank's parts of flattened ones, in one dimension (whole with `no_shard`),
    so optimizers that work on matrices are refused, and one parameter's names hold `_fsdp_wrapped_module`.

    Args:
        sharding: how the model is divided; without `offload` and `rank0_loads`.
        precision: `no` or `bf16`.
        limit_all_gathers: have at most two units gathered ahead of the device.
        find_unused_parameters: let parameters take no part in a rank's loss: they get a gradient of zeros, by which
            decay and momentum go on, if their unit has others that do. Without it such a parameter is an error.
        whole_checkpoints: have checkpoints hold whole weights.
        backend: what carries collectives; None takes gloo on the CPU and NCCL on CUDA.
        timeout_s: seconds to wait for other ranks, in joining and in each collective.
        use_cpu: compute on the CPU even where there is CUDA.

    Attributes:
        device: where this process computes.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
        world_size: number of processes.
        forwards_together: True: a forward is an exchange between all ranks, so that each must make as many.

    Raises:
        ValueError: an argument or the environment does not fit this machine, or FSDP1 cannot do it.
        ConnectionError: the ranks did not find each other.
        RuntimeError: a process group exists and is not what the environment says.
    """

    forwards_together = True

    def __init__(
        self,
        sharding: Sharding | None = None,
        *,
        precision: str = "no",
        limit_all_gathers: bool = True,
        find_unused_parameters: bool = False,
        whole_checkpoints: bool = False,
        backend: str | None = None,
        timeout_s: float = 1800.0,
        use_cpu: bool = False,
    ) -> None:
        self.sharding = sharding or Sharding()
        _refuse(self.sharding, precision)
        self._limits, self._whole = limit_all_gathers, whole_checkpoints
        self._finds_unused = find_unused_parameters
        self._use: Use | None = None
        environment = read_environment()
        device = rank_device(environment, use_cpu=use_cpu)
        super().__init__(environment, device, precision=precision, backend=backend, timeout_s=timeout_s)
        replicas, shards = self.sharding.mesh_shape(self.world_size, environment.local_world_size)
        mesh = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
        # A group of one rank would be trained by itself, in silence; without replicas there is nothing hybrid.
        self._mesh = mesh if replicas > 1 and shards > 1 else None
        self._shards = mesh.get_group("shard") if shards > 1 else None
        self._places: Places | None = None
        self._pieces: dict[str, Piece] = {}

    @classmethod
    def from_arguments(cls, args: Any) -> FSDP1:
        """Build from the same fields of training arguments as `FSDP.from_arguments`.

        Raises:
            ValueError: they ask for what goes by whole parameters or their names.
        """
        for name, reason in (
            ("ema_decay", "averages whole parameters, or shards of them by name"),
            ("parameter_rules", "goes by the names of parameters, which FSDP1 changes"),
        ):
            if getattr(args, name, None):
                raise ValueError(f"fsdp_config: version=1 and {name}, which {reason}; leave version out")
        config = args.fsdp_config
        sharding = Sharding.from_config(args.fsdp, config, args.parallelism_config)
        if args.optim_target_modules and sharding.strategy != "no_shard":
            raise ValueError(
                f"optim={args.optim!r} projects matrices, and FSDP1 flattens them (fsdp_config: version=1); leave "
                "version out"
            )
        return cls(
            sharding,
            limit_all_gathers=config.get("limit_all_gathers", True),
            find_unused_parameters=bool(args.ddp_find_unused_parameters),
            whole_checkpoints=config.get("state_dict_type") == "FULL_STATE_DICT",
            **options_of(args),
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Divide the model, which is changed in place, and return what to train in its stead.

        Collective. Frozen and trainable are taken as they are now; a frozen parameter is divided too.

        Raises:
            ValueError: the model has no trainable parameter, is wrapped already, has no values yet (meta device), has
                no module of a class that was named, or has state that is no tensor.
        """
        check_trainable(model, self.device)
        if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
            raise ValueError("the model is divided by FSDP1 already; give prepare() the model as it was built")
        units = {id(module) for module in choose_units(model, self.sharding)}
        places = Places(model)
        shapes = {name: part.shape for name, part in places.parts().items()}
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if self.sharding.sync_module_states:
            broadcast_values(model, self.device)
        with warnings.catch_warnings():
            # That no_shard is old, and that fully_shard is newer: it was asked for by its version.
            warnings.simplefilter("ignore", FutureWarning)
            divided = fsdp.FullyShardedDataParallel(
                model,
                device_mesh=self._mesh,
                sharding_strategy=self._kind(),
                auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
                backward_prefetch=_PREFETCH[self.sharding.backward_prefetch],
                forward_prefetch=self.sharding.forward_prefetch,
                limit_all_gathers=self._limits,
                mixed_precision=self._mixed_precision(),
                device_id=self.device,
                use_orig_params=True,  # or an optimizer that has the parameters already would change nothing
            )
        self._check_divided(divided)
        places.find_units(divided)
        self._places = places
        self._pieces = pieces_of(places, shapes, self._shards) if self._shards else {}
        self._use = None if self._finds_unused else Use(divided, trainable)
        generate_together(model, self.sum, self.device)
        _generate_whole(model, divided)
        return divided

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        inner = getattr(model, "_orig_mod", model)
        return inner.module if isinstance(inner, fsdp.FullyShardedDataParallel) else inner

    @contextmanager
    def accumulate(self, model: nn.Module, *, sync: bool) -> Iterator[None]:
        """Surround forward and backward of one micro-batch; without `sync` gradients stay local, whole, and add up.

        Raises:
            TypeError: `model` is not what `prepare` returned.
            RuntimeError: on leaving with `sync`, no parameter has a gradient, or one got none in this step.
        """
        divided = self._prepared(model, fsdp.FullyShardedDataParallel)
        if not sync:
            with divided.no_sync():
                yield
            return
        yield
        if self._shards is None and all(p.grad is None for p in divided.parameters()):
            raise RuntimeError("a micro-batch ended without a backward; call backward(loss) inside accumulate(...)")
        if self._use is not None:
            self._use.check()

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Returns:
            The norm before clipping, of the whole model, on every rank the same; a scalar tensor on the device.
        """
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = total_norm(gradients, self.device)
        if self._shards is not None:
            square = norm.square()
            dist.all_reduce(square, group=self._shards)
            norm = square.sqrt()
        if max_norm is not None:
            scale_to(gradients, max_norm, norm)
        return norm

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Make sure that an optimizer can do with parts of flattened parameters; nothing else is needed.

        Raises:
            ValueError: it works on matrices, or may.
        """
        kind = type(optimizer)
        in_backward = getattr(optimizer, "fused_in_backward", False)
        known = any(base.__name__ in _BY_NUMBER and base.__module__.startswith("torch.optim") for base in kind.__mro__)
        if in_backward or (self._shards is not None and not known):
            raise ValueError(
                f"{kind.__name__} needs whole parameters, or may, and FSDP1 flattens them (fsdp_config: version=1); "
                f"leave version out, or use one of torch's {', '.join(_BY_NUMBER)}"
            )

    def stateful(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return what a checkpoint holds, by name: `model`, and `optimizer` if given.

        Both are saved in rows of whole parameters, each rank its own, or with `whole_checkpoints` the model whole.
        """
        places, saved = self._known_places(), optimizer
        if optimizer is not None and self._shards is not None:
            saved = FlatOptimizer(optimizer, self._pieces, places.parts())
        return self._parts(FlatModel(places, whole=self._whole), saved)

    def whole_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict with whole tensors in host memory; empty but on rank 0. Collective."""
        return whole_state(self._known_places(), keep=self.rank == 0)

    def _kind(self) -> fsdp.ShardingStrategy:
        if self._shards is None:
            return fsdp.ShardingStrategy.NO_SHARD
        reshards = self.sharding.reshards_after_forward
        if self._mesh is None:
            return fsdp.ShardingStrategy.FULL_SHARD if reshards else fsdp.ShardingStrategy.SHARD_GRAD_OP
        return fsdp.ShardingStrategy.HYBRID_SHARD if reshards else fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2

    def _mixed_precision(self) -> fsdp.MixedPrecision | None:
        if self._precision.dtype is None:
            return None
        lower = self._precision.dtype
        return fsdp.MixedPrecision(param_dtype=lower, reduce_dtype=torch.float32, cast_forward_inputs=True)

    def _known_places(self) -> Places:
        if self._places is None:
            raise RuntimeError("there is nothing divided yet; call prepare(model) first")
        return self._places

    def _check_divided(self, divided: fsdp.FullyShardedDataParallel) -> None:
        """Make sure that every unit is divided over the ranks that were asked for: FSDP1 falls back in silence."""
        wanted = self.world_size if self._shards is None else dist.get_world_size(self._shards)
        kind = self._kind()
        for unit in fsdp.FullyShardedDataParallel.fsdp_modules(divided):
            found, ranks = unit.sharding_strategy, dist.get_world_size(unit.process_group)
            if (found, ranks) != (kind, wanted):
                raise RuntimeError(f"FSDP1 made a unit of {found} over {ranks} ranks, not of {kind} over {wanted}")


def _refuse(sharding: Sharding, precision: str) -> None:
    refused = {
        "offload": (sharding.offload, "keeps parameters in pinned memory, which needs CUDA"),
        "cpu_ram_efficient_loading": (sharding.rank0_loads, "needs an accelerator to send the weights through"),
        "fp16": (precision == "fp16", "has a loss scaler of its own kind"),
    }
    for name, (is_asked_for, reason) in refused.items():
        if is_asked_for:
            raise ValueError(f"fsdp_config: version=1 and {name}: FSDP1 {reason}; leave version out, for FSDP2")


def _generate_whole(model: nn.Module, divided: fsdp.FullyShardedDataParallel) -> None:
    """Have `generate` find whole what no unit gathers: it calls the model inside, and parts of it by themselves."""
    generate = getattr(model, "generate", None)
    if not callable(generate):
        return

    @functools.wraps(generate)
    def whole(*inputs: Any, **options: Any) -> Any:
        with fsdp.FullyShardedDataParallel.summon_full_params(divided, recurse=False, writeback=False):
            return generate(*inputs, **options)

    cast("Any", model).generate = whole
