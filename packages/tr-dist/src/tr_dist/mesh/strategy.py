"""Train one model over a mesh of processes: replicas and shards of data, and matrices that are divided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tr_dist.base import common_options, some_of
from tr_dist.environment import LaunchEnvironment
from tr_dist.fsdp.settings import Sharding
from tr_dist.fsdp.strategy import FSDP
from tr_dist.mesh.data_ranks import DataRanks
from tr_dist.mesh.tensor import check_sizes, divide, plan_of


class Mesh(FSDP):
    """Processes in several directions: `tp` of them compute each sample together, and hold a part of each matrix.

    Those of a sample follow each other, so that they are on one machine. The others share out the samples as under
    FSDP, by replicas and shards.

    Args:
        sharding: how the model is divided over those that compute other samples.
        tp: processes that compute a sample together.
        tp_plan: which modules they divide, and how; None takes the plan of a model of transformers.
        **options: those of `FSDP`.

    Attributes:
        data: this process among those that compute other samples.

    Raises:
        ValueError: the number of processes is not a multiple, or what `FSDP` raises.
    """

    def __init__(
        self, sharding: Sharding | None = None, *, tp: int = 1, tp_plan: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self._tp, self._plan = tp, tp_plan
        if sharding is not None and sharding.rank0_loads:
            raise ValueError("cpu_ram_efficient_loading is not done with tp_size; leave it out")
        if options.get("precision") == "fp16":
            raise ValueError("fp16=True is not done with tp_size: set bf16=True, or train in float32")
        super().__init__(sharding, **options)

    @classmethod
    def from_arguments(cls, args: Any) -> Mesh:
        """Build from the training arguments of `FSDP`, and `tp_size` of `parallelism_config` with `tp_plan`.

        Raises:
            ValueError: they contradict each other.
        """
        sizes = args.parallelism_config or {}
        return cls(
            Sharding.from_config(args.fsdp or ("no_shard",), args.fsdp_config, sizes),
            tp=sizes.get("tp_size", 1),
            tp_plan=args.tp_plan,
            find_unused_parameters=bool(args.ddp_find_unused_parameters),
            whole_checkpoints=args.fsdp_config.get("state_dict_type") == "FULL_STATE_DICT",
            **common_options(args),
        )

    @property
    def data(self) -> DataRanks:
        """Return this process among those that compute other samples."""
        return self._data

    @contextmanager
    def accumulate_fused(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Refuse: an optimizer that works in the backward pass knows nothing of divided matrices.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "an optimizer that consumes gradients in the backward pass is not for tp_size; choose another optim, such "
            "as adamw_torch"
        )
        yield

    def _make_mesh(self, environment: LaunchEnvironment) -> DeviceMesh:
        if self.world_size % self._tp:
            raise ValueError(f"tp_size={self._tp} does not divide the {self.world_size} processes that were started")
        local = environment.local_world_size
        within = local // self._tp if local and local % self._tp == 0 else None
        replicas, shards = self.sharding.mesh_shape(self.world_size // self._tp, within)
        self._whole = init_device_mesh(
            self.device.type, (replicas, shards, self._tp), mesh_dim_names=("replicate", "shard", "tp")
        )
        ranks = self._whole.mesh
        self._data = DataRanks(
            ranks.flatten(0, 1).T.tolist(), self.rank, self.local_rank, self.device, self._host, self._timeout
        )
        self._of_model, _ = dist.new_subgroups_by_enumeration(ranks.flatten(1, 2).tolist(), timeout=self._timeout)
        return self._whole["shard"] if replicas == 1 else self._whole["replicate", "shard"]

    def _divide(self, model: nn.Module) -> None:
        if divided := [name for name, p in model.named_parameters() if isinstance(p, DTensor)]:
            raise ValueError(
                f"{some_of(divided)} are divided already, as by from_pretrained(tp_plan='auto'); give the model whole, "
                "and tp_size divides it"
            )
        styles = plan_of(model, self._plan)
        check_sizes(model, styles, self._tp)
        divide(model, styles, self._whole["tp"])

    def _by_share(
        self, gradients: Sequence[torch.Tensor], local: Sequence[torch.Tensor]
    ) -> dict[float, list[torch.Tensor]]:
        size, found = dist.get_world_size(self._shards()), dict[float, list[torch.Tensor]]()
        for gradient, part in zip(gradients, local, strict=True):
            parts = 1
            if isinstance(gradient, DTensor):
                places = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
                parts = math.prod(number for number, placement in places if not isinstance(placement, Replicate))
            found.setdefault(parts / size, []).append(part)
        return found

    def _shards(self) -> dist.ProcessGroup:
        return cast("dist.ProcessGroup", self._of_model)  # this process is in one of them
