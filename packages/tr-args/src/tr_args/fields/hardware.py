"""Declare seeds and devices, precision, memory and compilation, and how processes work together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tr_args.constraints import (
    Above,
    AtLeast,
    CommaSeparated,
    Later,
    Numbers,
    OptionalCount,
    OptionalSeed,
    Options,
    Seed,
    UserPath,
)
from tr_args.files import ConfigFile
from tr_args.types.sharding import AcceleratorConfig, FsdpConfig, FsdpOptions, ParallelSizes


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HardwareFields:
    """Seeds and devices."""

    _title = "Seeds and devices"

    seed: Annotated[Seed, Numbers.OTHER] = 42
    """Seed of all random numbers."""

    data_seed: Annotated[OptionalSeed, Numbers.ORDER] = None
    """Seed of the data's order. Unset is seed."""

    full_determinism: Annotated[bool, Numbers.OTHER] = False
    """Use only deterministic algorithms: the same bits in every run, slower."""

    use_cpu: Annotated[bool, Numbers.OTHER, Later.NEW_TRAINER] = False
    """Train on the CPU even if there is another device."""

    strategy: Annotated[str, Numbers.OTHER, Later.NEW_TRAINER] = "auto"
    """How to train: auto, single (one device), ddp, fsdp, or the name of an installed strategy."""

    accelerator_config: Annotated[AcceleratorConfig, ConfigFile(), Numbers.OTHER, Later.NEW_TRAINER] = field(
        default_factory=AcceleratorConfig
    )
    """How data is shared among processes, as a mapping or a file, such as {"even_batches": false}."""

    parallelism_config: Annotated[Options, ParallelSizes(), Numbers.OTHER, Later.NEW_TRAINER] = None
    """Processes to spread samples, shards and matrices over, such as "tp=2,dp_shard=4" or {"tp_size": 2}."""

    tp_plan: Annotated[Options, Numbers.OTHER, Later.NEW_TRAINER] = None
    """What tp_size divides, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}; unset: the model's plan."""

    ep_plan: Annotated[Options, Numbers.OTHER, Later.NEW_TRAINER] = None
    """Which modules ep_size shares out, such as {"layers.*.experts": "experts"}; unset: the model's plan."""

    pp_split: Annotated[list[str] | None, Numbers.OTHER, Later.NEW_TRAINER] = None
    """First layer of each stage of pp_size but the first, such as ["layers.8"]; unset: as many layers each."""

    pp_schedule: Annotated[Literal["1f1b", "gpipe", "interleaved"], Numbers.OTHER, Later.NEW_TRAINER] = "1f1b"
    """How micro-batches go through the stages of pp_size: one forward, one backward; all forwards first; in turns."""

    skip_memory_metrics: Annotated[bool, Numbers.UNCHANGED, Later.NEW_TRAINER] = True
    """Do not add memory use to the metrics."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class PrecisionFields:
    """Precision, memory and compilation."""

    _title = "Precision, memory and compilation"

    bf16: Annotated[bool, Numbers.OTHER, Later.NEW_TRAINER] = False
    """Compute in bfloat16 where it is safe (mixed precision)."""

    fp16: Annotated[bool, Numbers.OTHER, Later.NEW_TRAINER] = False
    """Compute in float16 where it is safe, with a scaled loss (mixed precision)."""

    bf16_full_eval: Annotated[bool, Numbers.OTHER] = False
    """Convert the whole model to bfloat16 for evaluation and prediction outside training, and back afterwards."""

    fp16_full_eval: Annotated[bool, Numbers.OTHER] = False
    """Convert the whole model to float16 for evaluation and prediction outside training, and back afterwards."""

    tf32: Annotated[bool | None, Numbers.OTHER] = None
    """Allow (true) or forbid (false) TF32 in products and convolutions; unset leaves torch's settings."""

    activation_checkpointing: Annotated[bool, Numbers.OTHER] = False
    """Recompute activations in the backward pass instead of keeping them: less memory, slower."""

    activation_checkpointing_kwargs: Annotated[Options, Numbers.OTHER] = None
    """Options of torch.utils.checkpoint, such as {"use_reentrant": false}, and two more: every_n_layers checkpoints
    only every so many layers, offload keeps the inputs of checkpointed layers in host memory."""

    torch_compile: Annotated[bool, Numbers.OTHER, Later.NEW_TRAINER] = False
    """Compile the model with torch.compile, in training and evaluation."""

    torch_compile_backend: Annotated[str | None, Numbers.OTHER, Later.NEW_TRAINER] = None
    """Backend of torch.compile; setting it turns compilation on. Without one it is inductor."""

    torch_compile_mode: Annotated[str | None, Numbers.OTHER, Later.NEW_TRAINER] = None
    """Mode of inductor, such as max-autotune; setting it turns compilation on."""

    step_compile: Annotated[Literal["off", "auto", "graph"], Numbers.OTHER, Later.NEW_TRAINER] = "off"
    """Capture a step once, and replay it: as a CUDA graph, or compiled by inductor on a CPU. auto: the ordinary step
    where one cannot be captured, with the reason in the log. graph: refuse to train there."""

    use_liger_kernel: Annotated[bool, Numbers.OTHER, Later.NEW_TRAINER] = False
    """Patch the model with Liger kernels before training."""

    liger_kernel_config: Annotated[Options, Numbers.OTHER, Later.NEW_TRAINER] = None
    """Which Liger kernels to use, such as {"rope": true}."""

    use_cache: Annotated[bool, Numbers.OTHER] = False
    """Value of the model's use_cache setting while training."""

    torch_empty_cache_steps: Annotated[OptionalCount, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Release the device's cached memory every so many steps; unset never does."""

    auto_find_batch_size: Annotated[bool, Numbers.UNCHANGED] = False
    """When memory runs out, repeat the step with smaller and more micro-batches, and train on with them. A step keeps
    its samples."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class DistributedFields:
    """Distributed training and debugging."""

    _title = "Distributed training"

    ddp_backend: Annotated[str | None, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Backend of the process group, such as nccl or gloo. Unset is the device's own."""

    ddp_timeout: Annotated[int, Above(0), Numbers.UNCHANGED, Later.NEW_TRAINER] = 1800
    """Seconds after which a process stops waiting for the others."""

    hang_timeout: Annotated[int | None, AtLeast(0), Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """With several processes: seconds in which none of them makes progress, after which a report says who waits where
    for whom, and all end with exit code 97. 0 switches it off. Unset is nine tenths of ddp_timeout, and ends only a job
    in which a process waits for another."""

    ddp_find_unused_parameters: Annotated[bool | None, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Search for parameters without a gradient in every step; costs time. Unset lets the strategy decide."""

    ddp_bucket_cap_mb: Annotated[OptionalCount, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """MiB of gradients that are exchanged at once."""

    ddp_broadcast_buffers: Annotated[bool | None, Numbers.OTHER, Later.NEW_TRAINER] = None
    """Broadcast buffers from the first process in every forward pass."""

    ddp_static_graph: Annotated[bool | None, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Promise that every step uses the same parameters, in the same order."""

    elastic: Annotated[Literal["bitwise"] | None, Numbers.OTHER, Later.NEW_TRAINER] = None
    """bitwise: the same weights and logs, bit by bit, on any number of processes up to virtual_shards (with fsdp a
    power of two), also if it changes at a resume, or during a run of trainer launch --elastic."""

    virtual_shards: Annotated[OptionalCount, Numbers.OTHER, Later.NEW_TRAINER] = None
    """With elastic: processes that a step is computed as if by; a power of two. per_device_train_batch_size is that of
    each."""

    fsdp: Annotated[list[str], FsdpOptions(), Numbers.OTHER, Later.NEW_TRAINER] = field(default_factory=list)
    """Shard the model: full_shard, shard_grad_op, no_shard or hybrid_shard, with auto_wrap and offload."""

    fsdp_config: Annotated[dict[str, Any], ConfigFile(), FsdpConfig(), Numbers.OTHER, Later.NEW_TRAINER] = field(
        default_factory=dict
    )
    """Further sharding options, as a mapping or a file; their names may start with fsdp_."""

    deepspeed: Annotated[dict[str, Any] | str | None, UserPath(), Numbers.OTHER, Later.NEW_TRAINER] = None
    """DeepSpeed configuration, as a mapping or the path of its JSON file."""

    local_rank: Annotated[int, Numbers.UNCHANGED, Later.NEW_TRAINER] = -1
    """Number of this process on its machine, as old launchers pass it; newer ones set LOCAL_RANK."""

    debug: Annotated[list[Literal["underflow_overflow", "tpu_metrics_debug"]], CommaSeparated(), Numbers.UNCHANGED] = (
        field(default_factory=list)
    )
    """Debugging aids: underflow_overflow, tpu_metrics_debug."""
