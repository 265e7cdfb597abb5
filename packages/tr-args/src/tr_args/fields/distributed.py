"""Distributed training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tr_args.config_file import ConfigFile
from tr_args.constraints import Above, CommaSeparated, UserPath
from tr_args.fsdp import FsdpConfig, FsdpOptions
from tr_args.hints import OptionalCount


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class DistributedFields:
    """Distributed training and debugging."""

    _title = "Distributed training"

    ddp_backend: str | None = None
    """Backend that processes talk through, such as nccl or gloo. Unset is the device's own."""

    ddp_timeout: Annotated[int, Above(0)] = 1800
    """Seconds after which a process stops waiting for the others."""

    ddp_find_unused_parameters: bool | None = None
    """Look in every step for parameters that got no gradient; costs time. Unset lets the strategy decide."""

    ddp_bucket_cap_mb: OptionalCount = None
    """MiB of gradients that are exchanged at once."""

    ddp_broadcast_buffers: bool | None = None
    """Copy buffers from the first process to the others in every forward pass."""

    ddp_static_graph: bool | None = None
    """Promise that every step uses the same parameters, in the same order."""

    fsdp: Annotated[list[str], FsdpOptions()] = field(default_factory=list)
    """Shard the model: full_shard, shard_grad_op, no_shard or hybrid_shard, with auto_wrap and offload."""

    fsdp_config: Annotated[dict[str, Any], ConfigFile(), FsdpConfig()] = field(default_factory=dict)
    """Further sharding options, as a mapping or a file; their names may start with fsdp_."""

    deepspeed: Annotated[dict[str, Any] | str | None, UserPath()] = None
    """DeepSpeed configuration, as a mapping or the path of its JSON file."""

    local_rank: int = -1
    """Number of this process on its machine, as old launchers pass it; newer ones set LOCAL_RANK."""

    debug: Annotated[list[Literal["underflow_overflow", "tpu_metrics_debug"]], CommaSeparated()] = field(
        default_factory=list
    )
    """Debugging aids: underflow_overflow, tpu_metrics_debug."""
