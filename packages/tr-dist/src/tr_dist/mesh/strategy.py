"""Train one model over a mesh of processes: replicas and shards of data, and matrices that are divided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tr_dist.base import common_options
from tr_dist.environment import LaunchEnvironment
from tr_dist.fsdp.settings import Sharding
from tr_dist.fsdp.strategy import FSDP
from tr_dist.mesh.data_ranks import DataRanks, own_group
from tr_dist.mesh.direction import Direction, far_neighbours, sizes_of
from tr_dist.mesh.experts import Experts
from tr_dist.mesh.ring import Ring
from tr_dist.mesh.sequence import Context, Sequences
from tr_dist.mesh.tensor import Tensor
from tr_log import get_logger, warning_once

# Arguments, and the directions that they are not done with.
_REFUSED = (
    (("torch_compile", "step_compile"), ("tp", "pp")),
    (("neftune_noise_alpha",), ("tp", "cp", "sp")),  # each process would draw other noise, for the length of its piece
    (("predict_with_generate",), ("pp", "cp", "sp")),
    (("auto_find_batch_size", "ema_decay", "count_flops"), ("pp",)),
)
_logger = get_logger(__name__)


class Mesh(FSDP):
    """Processes in several directions: some compute each sample together, the others share out the samples.

    Those of a sample follow each other in the order `sp`, `tp`, so that they are on one machine, and stages of layers
    (`pp`) are furthest apart. The others share out the samples as under FSDP, by replicas and shards. Those that share
    out a sequence hold shards too.

    Args:
        sharding: how the model is divided over those that compute other samples.
        directions: in which processes compute a sample together, each of its own name; at least one.
        **options: those of `FSDP`.

    Attributes:
        data: this process among those that compute other samples.
        sizes: of the directions, named as in `parallelism_config`.

    Raises:
        ValueError: the number of processes is not a multiple, or what `FSDP` raises.
    """

    def __init__(self, sharding: Sharding | None = None, *, directions: Sequence[Direction], **options: Any) -> None:
        self._directions = directions
        self.sizes = {f"{direction.name}_size": direction.size for direction in directions}
        together = " and ".join(self.sizes)
        if sharding is not None and sharding.rank0_loads:
            raise ValueError(f"cpu_ram_efficient_loading is not done with {together}; leave it out")
        if options.get("precision") == "fp16":
            raise ValueError(f"fp16=True is not done with {together}: set bf16=True, or train in float32")
        super().__init__(sharding, **options)

    @classmethod
    def from_arguments(cls, args: Any) -> Mesh:
        """Build from the training arguments of `FSDP`, and the sizes of `parallelism_config` with their plans.

        Raises:
            ValueError: they contradict each other.
        """
        return cls(
            Sharding.from_config(args.fsdp or ("no_shard",), args.fsdp_config, args.parallelism_config or {}),
            directions=cls.directions_of(args),
            find_unused_parameters=bool(args.ddp_find_unused_parameters),
            whole_checkpoints=args.fsdp_config.get("state_dict_type") == "FULL_STATE_DICT",
            **common_options(args),
        )

    @classmethod
    def directions_of(cls, args: Any) -> list[Direction]:
        """Return the directions that the training arguments give, from the outermost.

        Raises:
            ValueError: an argument does not work with one of them.
        """
        sizes = sizes_of(args)
        for names, refusing in _REFUSED:
            given = [f"{name}_size" for name in refusing if sizes[f"{name}_size"] > 1]
            for name in names if given else ():
                if getattr(args, name, None) not in (None, False, "off"):
                    raise ValueError(f"{name} is not done with {given[0]}; leave it out")
        context = Ring if sizes["cp_comm_strategy"] == "alltoall" else Context
        every = (
            context(sizes["cp_size"], args.label_names),
            Sequences(sizes["sp_size"], args.label_names),
            Tensor(sizes["tp_size"], args.tp_plan, shares_experts=sizes["ep_size"] > 1),
            Experts(sizes["ep_size"], args.ep_plan),
        )
        return [direction for direction in every if direction.size > 1]

    @property
    def data(self) -> DataRanks:
        """Return this process among those that compute other samples."""
        return self._data

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Surround a forward pass and its loss; a note to an error says what is computed in parts."""
        with super().autocast():
            try:
                yield
            except Exception as error:
                if not hasattr(error, "__notes__"):
                    parts = "; ".join(f"{each.name}_size={each.size}: {each.computes}" for each in self._directions)
                    error.add_note(
                        f"a process computes a part of each sample ({parts}); if a module counts on all of it, leave "
                        "it out of the plan (tp_plan, ep_plan), or choose another direction"
                    )
                raise

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar loss."""
        with ExitStack() as around:
            for direction in self._directions:
                around.enter_context(direction.in_backward())
            if any(direction.seen["torch"] for direction in self._directions):
                # Of the tensor itself, torch would leave the function mode of that context for the backward pass.
                torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
            else:
                super().backward(loss)

    @contextmanager
    def accumulate_fused(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Refuse: an optimizer that works in the backward pass knows nothing of divided matrices.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"an optimizer that consumes gradients in the backward pass is not for {self._directions[0].name}_size; "
            "choose another optim, such as adamw_torch"
        )
        yield

    def _make_mesh(self, environment: LaunchEnvironment) -> DeviceMesh:
        of_pieces = "cp" if "cp_size" in self.sizes else "sp"
        names = ("pp", "dp_replicate", "dp_shard", of_pieces, "tp")  # from the outermost
        stages, context, pieces, parts = (self.sizes.get(f"{name}_size", 1) for name in ("pp", "cp", "sp", "tp"))
        pieces *= context
        together = stages * pieces * parts
        if self.world_size % together:
            product = " x ".join(f"{name}={size}" for name, size in self.sizes.items() if name != "ep_size")
            raise ValueError(f"{product} does not divide the {self.world_size} processes that were started")
        local, near = environment.local_world_size, pieces * parts
        within = local // near if local and local % near == 0 else None
        replicas, shards = self.sharding.mesh_shape(self.world_size // together, within)
        shape = (stages, replicas, shards * pieces, parts)
        self._whole = init_device_mesh(self.device.type, shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))
        if self.sizes.keys() == {"tp_size"}:
            self.adopts = self._whole["tp"].mesh.tolist()
        ranks = self._whole.mesh.view(stages, replicas, shards, pieces, parts)
        places = zip(names, ranks.shape, (ranks == self.rank).nonzero()[0].tolist(), strict=True)
        self.coordinates = {name: place for name, size, place in places if size > 1}
        if far := far_neighbours(near, environment.local_world_size, self.world_size):
            warning_once(_logger, "%s", far)
        self._data = DataRanks(ranks.permute(0, 3, 4, 1, 2).reshape(together, replicas * shards).tolist(), self)
        for direction in self._directions:
            direction.join(ranks, self.device, lambda groups: DataRanks(groups, self))
        copies = replicas // max(direction.replicas_a_copy for direction in self._directions)
        of_model = ranks.transpose(0, 1).reshape(copies, -1).tolist()
        self._of_model = own_group(of_model, self)
        return self._whole["shard"] if replicas == 1 else self._whole["replicate", "shard"]

    def check_model(self, model: nn.Module) -> None:
        """Raise `ValueError` if the model cannot be divided in every direction."""
        super().check_model(model)
        for direction in self._directions:
            direction.check(model)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Divide the model in place in every direction, and return it; see `FSDP.prepare`."""
        prepared = super().prepare(model)
        for direction in self._directions:
            direction.finish(prepared)
        return prepared

    def window_metrics(self) -> dict[str, torch.Tensor]:
        """Return what the directions measured since the last call, the same on every rank. Collective; no sync."""
        return {
            name: value for direction in self._directions for name, value in direction.metrics(self._data.sum).items()
        }

    def _divide(self, model: nn.Module) -> None:
        if self.sharding.sync_module_states:
            for parameter in model.parameters():
                if isinstance(parameter, DTensor):  # loaded in parts, of which each goes to its replicas
                    dist.broadcast(parameter.to_local().detach(), group=self._data.group, group_src=0)
        for direction in self._directions:
            direction.divide(model, self._whole)

    def _apart(self) -> list[tuple[nn.Module, DeviceMesh]]:
        return [pair for direction in self._directions for pair in direction.apart()]

    def close(self, *, failed: bool = False) -> None:
        """Undo what the directions changed, and leave the process group if this object joined it."""
        for direction in self._directions:
            direction.close()
        super().close(failed=failed)

    def _share_of(self, gradient: torch.Tensor) -> float:
        parts = 1
        if isinstance(gradient, DTensor):
            places = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            parts = math.prod(number for number, placement in places if not isinstance(placement, Replicate))
        return parts / dist.get_world_size(self._shards())

    def _shards(self) -> dist.ProcessGroup:
        return cast("dist.ProcessGroup", self._of_model)  # this process is in one of them
