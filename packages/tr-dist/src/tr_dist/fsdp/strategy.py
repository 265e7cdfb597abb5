"""Train one model that is sharded over the ranks: parameters, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from tr_dist.base import OnRanks, before_clearing, check_trainable, clip_to_norm, common_options, some_of, total_norm
from tr_dist.environment import LaunchEnvironment, rank_device, read_environment
from tr_dist.fsdp.settings import Sharding, choose_units
from tr_dist.sharded_model import (
    FullStateModel,
    broadcast_values,
    drop_held,
    fill_shards,
    full_state_dict,
    synced_generation,
    values_of,
)

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its old name
_WITHOUT_GRADIENT = (
    "call backward(loss) inside accumulate(model, sync=True), use them in the loss, freeze them with "
    "requires_grad_(False), or set find_unused_parameters (ddp_find_unused_parameters)"
)


class ReduceScatter:
    """Exchanges the gradients of a unit, as torch does, if this rank has all of them.

    torch leaves out what has none. If ranks differ in that, they exchange unequal numbers: NCCL waits for ever, and
    gloo ends the process.

    Args:
        unit: of `fully_shard`.
        shapes: of its own parameters, by name, before they were sharded.
        shards: number of ranks over which they are sharded; 1 of plain replicas.
    """

    def __init__(self, unit: nn.Module, shapes: Mapping[str, Sequence[int]], shards: int) -> None:
        self._kind, self._shards = type(unit).__name__.removeprefix("FSDP"), shards  # which torch puts before it
        self._parameters = {name: p for name, p in unit.named_parameters() if name in shapes}
        # Each shard has as many rows as the first.
        self._sizes = {
            name: shards * -(-shapes[name][0] // shards) * math.prod(shapes[name][1:]) for name in self._parameters
        }
        self._had, self._hooks = set[str](), list[RemovableHandle]()
        self._begin = unit.register_forward_pre_hook(self._watch)

    def _watch(self, unit: nn.Module, inputs: Any) -> None:
        """Note in the first step which parameters get a gradient: an exchange sees their number alone."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._begin.remove()
            self._hooks = [
                gathered.register_post_accumulate_grad_hook(lambda _, name=name: self._had.add(name))
                for name, gathered in unit.named_parameters()
                if name in self._parameters and gathered.requires_grad  # a stage of layers may have lost some
            ]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor for what is sent, or for what comes."""
        if self._shards == 1:  # torch calls nothing else then
            self._check(size[0])
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, **options: Any
    ) -> Any:
        """Exchange; see `exchange`.

        Raises:
            RuntimeError: gradients are missing.
        """
        self._check(input_tensor.numel())
        return self.exchange(output_tensor, input_tensor, group, op, **options)

    def exchange(
        self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Any, **options: Any
    ) -> Any:
        """Sum what all ranks give, or take its mean, and keep this rank's part."""
        return _reduce_scatter(output, given, op, group, **options)

    def _check(self, number: int) -> None:
        wanted = {name: size for name, size in self._sizes.items() if self._parameters[name].requires_grad}
        if (missing := sum(wanted.values()) - number) > 0:
            without = {name: size for name, size in wanted.items() if name not in self._had}
            names = some_of([*without]) if sum(without.values()) == missing else f"some of {some_of([*wanted])}"
            raise RuntimeError(
                f"trainable parameters of a {self._kind} got no gradient on this rank: {missing} of "
                f"{missing + number} numbers, {names}; {_WITHOUT_GRADIENT}"
            )
        while self._hooks:
            self._hooks.pop().remove()


class FSDP(OnRanks):
    """Fully sharded data parallel training, by torch's `fully_shard` (FSDP2).

    Every rank holds a shard of each parameter, of its gradient and of its optimizer state, and works on its own part of
    each batch. A unit's parameters are gathered when it computes. Its gradients are averaged and sharded again as
    soon as they exist. Parameters are DTensors under their own names and shapes.

    The constructor joins the process group that the launcher's environment describes, as `tr_dist.DDP` does. The calls
    are the same, and so are the numbers, up to rounding. Optimizers are built after `prepare`, which replaces the
    parameters. Every rank must make the same number of forwards, in evaluation too.

    In `bf16` and `fp16` units are gathered and computed in that type, under autocast; gradients are averaged in
    float32, and weights and optimizer state are float32. In `fp16` losses are scaled: an overflow in the shards of one
    rank skips the update on all, and lowers the scale of all.

    Without `sync`, gradients stay full between the micro-batches of a step and are exchanged once a step. With `sync`
    in each micro-batch they are exchanged each time, and never full.

    Args:
        sharding: how the model is divided.
        precision: `no`, `bf16`, or `fp16` with loss scaling, which needs an accelerator.
        find_unused_parameters: allow parameters that do not contribute to a rank's loss: their gradient is zero.
            Without it such a parameter is an error.
        backend: the backend for collectives; None takes gloo on the CPU and NCCL on CUDA.
        timeout_s: seconds to wait for other ranks, when joining and in each collective.
        hang_timeout_s: seconds without progress of any rank after which all are ended; see `ProcessGroup`.
        use_cpu: compute on the CPU even if there is CUDA.

    Attributes:
        device: the device of this process.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
        world_size: number of processes.
        mesh: the ranks, by shards, or by replicas and shards.
        forward_is_collective: True: a forward is an exchange between all ranks, so that each must make as many.
        reduces_by: what exchanges the gradients of a unit, where torch lets others do so.

    Raises:
        ValueError: an argument or the environment does not fit this machine, or torch is too old for its device.
        ConnectionError: the ranks did not find each other.
        RuntimeError: a process group exists and differs from the environment.
    """

    acts_on = frozenset({"fsdp"})
    forward_is_collective = True
    reduces_by: type[ReduceScatter] = ReduceScatter
    _syncs: bool | None = None
    _holds = False  # gradients of a step that is not complete

    def __init__(
        self,
        sharding: Sharding | None = None,
        *,
        precision: str = "no",
        find_unused_parameters: bool = False,
        whole_checkpoints: bool = False,
        backend: str | None = None,
        timeout_s: float = 1800.0,
        hang_timeout_s: float | None = None,
        use_cpu: bool = False,
    ) -> None:
        self.sharding = sharding or Sharding()
        self._finds_unused, self._whole = find_unused_parameters, whole_checkpoints
        if find_unused_parameters and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ValueError(
                f"find_unused_parameters needs a newer torch than {torch.__version__}, whose fully_shard cannot do "
                "without a gradient; use every parameter in the loss, or strategy='ddp'"
            )
        environment = read_environment()
        device = rank_device(environment, use_cpu=use_cpu)
        _check_streams(device)
        group = {"timeout_s": timeout_s, "hang_timeout_s": hang_timeout_s}
        super().__init__(environment, device, precision=precision, backend=backend, **group)
        self.mesh = self._make_mesh(environment)

    @classmethod
    def from_arguments(cls, args: Any) -> FSDP:
        """Build from the training arguments that concern it.

        They are `fsdp`, `fsdp_config`, `parallelism_config`, `bf16`, `fp16`, `use_cpu`, `ddp_backend`, `ddp_timeout`
        and `ddp_find_unused_parameters`. With `state_dict_type='FULL_STATE_DICT'` checkpoints hold full weights.

        Raises:
            ValueError: they contradict each other, or need what FSDP2 does not have, such as `version=1`.
        """
        return cls(
            Sharding.from_config(args.fsdp, args.fsdp_config, args.parallelism_config),
            find_unused_parameters=bool(args.ddp_find_unused_parameters),
            whole_checkpoints=args.fsdp_config.get("state_dict_type") == "FULL_STATE_DICT",
            **common_options(args),
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model in place over all ranks, and return it.

        Collective. Which parameters are frozen is fixed by this call; frozen parameters are sharded too.

        Raises:
            ValueError: the model has no trainable parameter, is wrapped or divided already, has no values yet
                (meta device, unless `rank0_loads` and this is not rank 0), or has no module of a named class.
        """
        self.check_model(model)
        sharding = self.sharding
        has_values = not (sharding.rank0_loads and self.rank > 0)
        if has_values:
            check_trainable(model, self.device, self.adopts)
        units = choose_units(model, sharding)
        values = values_of(model) if sharding.rank0_loads and self.rank == 0 else {}
        if sharding.sync_module_states and not sharding.rank0_loads:
            broadcast_values(model, self.device)
        self._divide(model)
        options: dict[str, Any] = {
            "reshard_after_forward": sharding.reshards_after_forward,
            "mp_policy": self._policy(),
            "offload_policy": self._offload(),
        }
        held = {id(module) for module in model.modules()}  # a stage of layers has lost the others
        apart = [(module, mesh) for module, mesh in self._apart() if id(module) in held]
        held -= {id(module) for outer, _ in apart for module in outer.modules()}
        units = [unit for unit in units if id(unit) in held]
        for module, mesh in (*apart, *((module, self.mesh) for module in (*units, model))):
            self._shard(module, mesh, options)
            if not sharding.reshards_after_forward:
                module.register_forward_hook(free_gathered)
        if sharding.rank0_loads:
            fill_shards(model, values, self.device, on_host=sharding.offload)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        before_clearing(model, self._check_clearing, partial(drop_held, model))
        synced_generation(model, self.sum, self.device)
        if callable(getattr(model, "generate", None)):
            # Some models call parts, such as an encoder, by themselves before the model's own forward.
            register_fsdp_forward_method(model, "generate")
        self._set_prefetching(cast("list[FSDPModule]", units), cast("FSDPModule", model))
        if self._finds_unused:
            cast("FSDPModule", model).set_reduce_scatter_unused_params(True)
        self._check_divided(model)
        return model

    def _shard(self, module: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> None:
        """Make a module a unit, whose gradients are exchanged if all are there."""
        sharded = {id(p) for inner in module.modules() if isinstance(inner, FSDPModule) for p in inner.parameters()}
        shapes = {
            name: (p.to_local() if isinstance(p, DTensor) else p).shape
            for name, p in module.named_parameters()
            if id(p) not in sharded
        }
        fully_shard(module, mesh=mesh, **options)
        if shapes and not self._finds_unused and hasattr(FSDPModule, "set_custom_reduce_scatter"):
            comm = self.reduces_by(module, shapes, mesh.size(-1))
            cast("Any", module).set_custom_reduce_scatter(comm)  # whose class torch does not give out

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Have `optimizer.zero_grad` drop the gradients of a step that is not complete, which are not in `.grad`."""

        def drop() -> None:
            if self._holds:
                drop_held(self.unwrap(model))

        before_clearing(optimizer, self._check_clearing, drop)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`: the same one, also from under `torch.compile`."""
        return cast("nn.Module", getattr(model, "_orig_mod", model))

    @contextmanager
    def accumulate(self, model: nn.Module, *, sync: bool) -> Iterator[None]:
        """Run forward and backward of one micro-batch inside this context; without `sync` gradients add up locally.

        Raises:
            TypeError: `model` is not the result of `prepare`.
            RuntimeError: on exit with `sync`, a parameter has no gradient.
        """
        self._exchange(model, sync=sync)
        yield
        if sync:
            self._check_gradients(self.unwrap(model))
            self._holds = False

    @contextmanager
    def accumulate_fused(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Surround one micro-batch whose gradients an optimizer consumes in the backward pass, and adds up itself.

        It gets its shards of their means from each, so that gradients are never whole; none need be left at the end.

        Raises:
            TypeError: `model` is not what `prepare` returned.
        """
        self._exchange(model, sync=True)
        yield
        self._holds = False

    def _exchange(self, model: nn.Module, *, sync: bool) -> None:
        inner, self._holds = self._prepared(model, FSDPModule), True
        if self._syncs is not sync:
            inner.set_requires_gradient_sync(sync)
            self._syncs = sync

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Returns:
            The norm before clipping, of the whole model, the same on every rank; a scalar tensor on the device.
        """
        self._precision.unscale(optimizer)  # also over shards: torch combines the ranks' overflow flags
        gradients = [p.grad for p in self.unwrap(model).parameters() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        by_share, square = dict[float, list[torch.Tensor]](), torch.zeros((), device=self.device)
        for gradient, part in zip(gradients, local, strict=True):
            by_share.setdefault(self._share_of(gradient), []).append(part)
        for share, parts in by_share.items():
            square = square + share * total_norm(parts, self.device).square()
        dist.all_reduce(square, group=self._shards())
        norm = square.sqrt()
        if max_norm is not None:
            clip_to_norm(local, max_norm, norm)
        return norm

    def state_parts(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the parts of a checkpoint, by name: `model`, `optimizer` if given, `scaler` under float16.

        Each rank has its shards of the first two. With `whole_checkpoints` the state of `model` is gathered to full
        tensors.
        """
        inner = self.unwrap(model)
        return self._parts(FullStateModel(inner, keep=self.rank == 0) if self._whole else inner, optimizer)

    @contextmanager
    def gathered(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield one parameter gathered in full on every rank, to be read. Collective."""
        yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's full state dict in host memory; empty on all ranks but 0. Collective."""
        return full_state_dict(self.unwrap(model), keep=self.rank == 0)

    def _make_mesh(self, environment: LaunchEnvironment) -> DeviceMesh:
        replicas, shards = self.sharding.mesh_shape(self.world_size, environment.local_world_size)
        if self.sharding.strategy in ("full_shard", "shard_grad_op"):
            return init_device_mesh(self.device.type, (shards,), mesh_dim_names=("shard",))
        return init_device_mesh(self.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))

    def _divide(self, model: nn.Module) -> None:
        """Divide what computes one sample over several processes: here each has samples of its own."""

    def _apart(self) -> list[tuple[nn.Module, DeviceMesh]]:
        """Return the modules that become units over other processes than the rest, and over which: none."""
        return []

    def _shards(self) -> dist.ProcessGroup:
        """Return the processes that hold the model once, together."""
        return self.mesh.get_group("shard")

    def _share_of(self, gradient: torch.Tensor) -> float:
        """Return the share of the squares of its part of a gradient that this rank adds over `_shards`.

        Of a part that several of those hold each adds its share; here all have others, but what is not divided.
        """
        return 1.0 if isinstance(gradient, DTensor) else 1 / dist.get_world_size(self._shards())

    def _policy(self) -> MixedPrecisionPolicy:
        if self._precision.dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self._precision.dtype, reduce_dtype=torch.float32)

    def _offload(self) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.sharding.offload else OffloadPolicy()

    def _set_prefetching(self, units: list[FSDPModule], model: FSDPModule) -> None:
        """Set what is gathered ahead, if it differs from the default of `fully_shard`."""
        if self.sharding.backward_prefetch != "backward_pre":
            for unit in (*units, model):
                unit.set_modules_to_backward_prefetch([unit])  # the unit itself is gathered: prefetches nothing
        if self.sharding.forward_prefetch:
            for unit, following in pairwise(units):
                unit.set_modules_to_forward_prefetch([following])

    def _check_divided(self, model: nn.Module) -> None:
        """Raise if `fully_shard` silently left a parameter undivided."""
        for name, parameter in model.named_parameters():
            placements = getattr(parameter, "placements", ())
            if all(isinstance(placement, Replicate) for placement in placements):
                raise RuntimeError(f"parameter {name} is not divided after fully_shard, but {type(parameter).__name__}")

    def _check_gradients(self, model: nn.Module) -> None:
        missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            raise RuntimeError(
                f"{len(missing)} trainable parameters got no gradient in this micro-batch: {some_of(missing)}; "
                f"{_WITHOUT_GRADIENT}"
            )


def _check_streams(device: torch.device) -> None:
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise ValueError(
            f"strategy='fsdp' on the CPU needs torch 2.7: fully_shard of torch {torch.__version__} asks the CPU for "
            "events that it lacks; update torch, use strategy='ddp', or train on CUDA"
        )


def free_gathered(module: nn.Module, inputs: Any, output: Any) -> None:
    """Free a unit's gathered parameters after a forward without a backward.

    If they were kept, the next forward would compute with them, even if the shards have changed since. Averaged weights
    that replace the shards for an evaluation would have no effect.
    """
    if not torch.is_grad_enabled():
        cast("FSDPModule", module).reshard()
