"""Train on XLA devices: operations are recorded, compiled once for each shape, and run a step at a time.

`DeviceSharding` divides a model and its batches over all devices of one process (SPMD). The compiler adds the
communication.
"""

from __future__ import annotations

import importlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from tr_dist.base import OnDevice, check_trainable, consumes_gradients, precision_of, total_norm
from tr_dist.fsdp.settings import choose_units
from tr_dist.state_part import StatePart
from tr_dist.xla.library import check_replicas, load_torch_xla
from tr_dist.xla.replica_sharding import ReplicaSharding, module_state, move, to_host
from tr_dist.xla.settings import XlaSharding

AXIS = "fsdp"


class DeviceSharding:
    """Treat all XLA devices of a process as one device, each with a part of every parameter and of every batch.

    The program and its numbers, up to rounding, are those of one device. Batches whose rows do not divide evenly
    are divided too.

    Args:
        runtime: the module `torch_xla.runtime`, not used before.

    Attributes:
        count: number of devices.

    Raises:
        ValueError: the job has several processes.
    """

    def __init__(self, runtime: Any) -> None:
        runtime.use_spmd()
        if runtime.process_count() > 1:
            raise ValueError(
                f"xla_fsdp_v2=True divides the batches of one process, and this job has {runtime.process_count()}; "
                "use one machine"
            )
        import numpy as np

        self.count = int(runtime.global_runtime_device_count())
        self._spmd = importlib.import_module("torch_xla.distributed.spmd")
        self._specification = importlib.import_module("torch_xla")._XLAC._get_xla_sharding_spec
        self._mesh = self._spmd.Mesh(np.arange(self.count), (self.count,), (AXIS,))

    def divide(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        """Divide the parameters of a model on the device, and register hooks that divide its inputs.

        Optimizer state follows the parameters. A parameter with fewer rows and columns than there are devices
        stays undivided.
        """
        for parameter in model.parameters():
            if parameter.dim() and max(parameter.shape) >= self.count:
                self._mark(parameter, parameter.shape.index(max(parameter.shape)))
        model.register_forward_pre_hook(self._divide_inputs, with_kwargs=True)
        for unit in units:
            unit.register_forward_hook(self._divide_outputs)

    def is_divided(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on several devices in parts."""
        return "devices=" in self._specification(tensor)

    def _divide_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            self._by_rows(tensor)

    def _divide_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        # Otherwise the compiler might gather activations instead of weights.
        for tensor in _tensors(output):
            if tensor.dim() > 1:
                self._by_rows(tensor)

    def _by_rows(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "xla" and tensor.dim() and tensor.shape[0] > 1 and not self._specification(tensor):
            self._mark(tensor, 0)

    def _mark(self, tensor: torch.Tensor, dimension: int) -> None:
        axes = [AXIS if number == dimension else None for number in range(tensor.dim())]
        self._spmd.mark_sharding(tensor, self._mesh, tuple(axes))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


class XLA(OnDevice):
    """Training by torch_xla: on a TPU, or on PJRT's CPU.

    Calls only record operations. The strategy compiles what was recorded, if it is new, and runs it at each cut: after
    each micro-batch but the last of a step, after each update, and after each forward without gradients. Between cuts
    nothing is read from the device. Every new batch shape is a new program, compiled on first use: pad batches to few
    lengths.

    Without `sharding` each replica holds the whole model. There are several replicas if `torch_xla.launch` started the
    script, on a TPU; gradients are averaged over them.

    Args:
        sharding: how the model is divided over devices; None leaves it whole.
        precision: `no`, or `bf16` for autocast. float16 is not supported.
        use_cpu: compute on PJRT's CPU.

    Attributes:
        device: the device of this process.
        rank: number of this replica among all, from 0.
        local_rank: number of this replica on its machine, from 0.
        world_size: number of replicas; 1 where one process divides its batches over many devices.
        binds_optimizer: True: moving a model replaces its parameters, which an optimizer must have.
        forward_is_collective: whether a forward gathers weights from other replicas.

    Raises:
        ValueError: torch_xla is not installed or was switched off, or does not support an argument.
    """

    acts_on = frozenset({"fsdp"})
    binds_optimizer = True

    def __init__(self, sharding: XlaSharding | None = None, *, precision: str = "no", use_cpu: bool = False) -> None:
        if precision not in ("no", "bf16"):
            raise ValueError(
                f"precision={precision!r} is not supported on XLA, whose devices compute in float32 and bfloat16; use "
                "bf16=True, which needs no scaled losses, or neither"
            )
        self._library = load_torch_xla(use_cpu=use_cpu)
        self.sharding, runtime = sharding, self._library.runtime
        self.over_devices = DeviceSharding(runtime) if sharding is not None and sharding.over_devices else None
        if self.over_devices is None:
            check_replicas(self._library)
        super().__init__(self._library.torch_xla.device(), precision=precision)
        is_alone = self.over_devices is not None or runtime.is_spmd()
        self.rank = 0 if is_alone else runtime.global_ordinal()
        self.local_rank = 0 if is_alone else runtime.local_ordinal()
        self.world_size = 1 if is_alone else runtime.world_size()
        is_by_replicas = sharding is not None and not sharding.over_devices
        self._by_replicas = ReplicaSharding(self._library, sharding.settings) if sharding and is_by_replicas else None
        self.forward_is_collective = is_by_replicas
        self._is_uncut = False
        self._tags = itertools.count()

    @classmethod
    def from_arguments(cls, args: Any) -> XLA:
        """Build from the training arguments that concern it: `bf16`, `fp16`, `use_cpu`, `fsdp*`."""
        return cls(
            XlaSharding.from_config(args.fsdp, args.fsdp_config),
            precision=precision_of(args),
            use_cpu=args.use_cpu,
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and divide it, if configured; this replaces its parameters.

        Raises:
            ValueError: the model has no trainable parameter, no values yet (meta device), or is on another device; or
                a class named for units is not in it.
        """
        check_trainable(model, self.device)
        units = choose_units(model, self.sharding.units) if self.sharding is not None else []
        recomputes = self.sharding is not None and self.sharding.recomputes
        move(model, self.device)
        if self.world_size > 1:
            self._library.model.broadcast_master_param(model)
        if self._by_replicas is not None:
            return self._by_replicas.wrap(model, units, recomputes=recomputes)
        if self.over_devices is not None:
            self.over_devices.divide(model, units)
        if recomputes:
            checkpoint_module = importlib.import_module("torch_xla.distributed.fsdp").checkpoint_module
            for unit in units:
                checkpoint_module(unit)
        self._cut()
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        inner = getattr(model, "_orig_mod", model)
        return vars(inner).get("original", (inner,))[0]

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer has the parameters of the model; moving the model has replaced them.

        Raises:
            ValueError: it was built before the model was moved.
        """
        held = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in held for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} was built before the model was moved to {self.device}, which replaces its "
                "parameters: it would train what nobody uses. Name it by optim or optimizer_cls_and_kwargs, or build "
                "it after prepare()"
            )
        if self._by_replicas is not None and consumes_gradients(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} consumes gradients in the backward pass, where "
                "XlaFullyShardedDataParallel has none for it yet; use another optimizer, or divide the model with "
                "xla_fsdp_v2=True"
            )

    @contextmanager
    def accumulate(self, model: nn.Module, *, sync: bool) -> Iterator[None]:
        """Run forward and backward of one micro-batch inside this context; it is executed unless the update is next."""
        if self._is_uncut:
            self._cut()
        with nullcontext() if sync or self._by_replicas is None else cast("Any", model).no_sync():
            yield
        if sync and self.world_size > 1 and self._by_replicas is None:
            self._average(model)
        self._is_uncut = sync
        if not sync:
            self._cut()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Return the context for a forward and its loss: bfloat16, if on. Without gradients it is executed at exit."""
        with super().autocast():
            yield
        if not torch.is_grad_enabled():
            self._cut()

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Returns:
            The norm before clipping, a scalar tensor on the device; no sync.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], self.device)
        norm = norm if self._by_replicas is None else self._by_replicas.norm(norm)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients, and run the recorded operations. Returns True.

        Args:
            optimizer: the optimizer to step.
            skip: scalar on the device, the same on all replicas; if it is not 0, parameters and optimizer state stay
                unchanged. Sync: it is read in every step.
        """
        applied = super().step(optimizer, skip=skip)
        self._cut()
        return applied

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all replicas; the argument is unchanged. No sync."""
        return tensor if self.world_size == 1 else self._library.model.all_reduce("sum", tensor)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every replica's `tensor` of shape `(n, ...)` along dimension 0, in rank order."""
        return tensor if self.world_size == 1 else self._library.model.all_gather(tensor, dim=0)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every replica's picklable `value`, in rank order."""
        if self.world_size == 1:
            return [value]
        found = self._library.model.rendezvous(f"objects-{next(self._tags)}", pickle.dumps(value))
        return [pickle.loads(each) for each in found]  # of processes of this job

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start to find the largest of each of `values` over all replicas; it runs with the next cut."""
        if self.world_size == 1:
            return lambda: list(values)
        mine = torch.tensor(values, dtype=torch.int32).to(self.device)
        largest = self._library.model.all_reduce("max", mine)
        return lambda: largest.tolist()  # sync: for a step that was started before

    def barrier(self) -> None:
        """Wait until every replica has called it."""
        if self.world_size > 1:
            self._library.model.rendezvous(f"barrier-{next(self._tags)}")

    def state_parts(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the parts of a checkpoint, `model` and `optimizer` if given, with their states in host memory.

        They are full, and the same on every replica. They can be loaded without XLA, and the reverse.
        """
        by, inner = self._by_replicas, self.unwrap(model)
        if by is None:
            parts = {"model": StatePart(partial(module_state, inner), inner.load_state_dict)}
            if optimizer is not None:
                parts["optimizer"] = StatePart(lambda: to_host(optimizer.state_dict()), optimizer.load_state_dict)
            return parts
        parts = {"model": StatePart(partial(by.model_state, model), partial(by.load_model_state, model))}
        if optimizer is not None:
            save, load = partial(by.optimizer_state, optimizer), partial(by.load_optimizer_state, optimizer)
            parts["optimizer"] = StatePart(save, load)
        return parts

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict of the unwrapped model, in host memory."""
        by = self._by_replicas
        return module_state(self.unwrap(model)) if by is None else by.model_state(model)

    def close(self, *, failed: bool = False) -> None:
        """Run what is still recorded; there is no process group."""
        if not failed:
            self._cut()

    def _cut(self) -> None:
        """Compile what was recorded since the last cut, unless the program exists, and start it."""
        self._is_uncut = False
        self._library.torch_xla.sync()

    def _average(self, model: nn.Module) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self._library.model.all_reduce("sum", gradients, scale=1.0 / self.world_size)  # in place
