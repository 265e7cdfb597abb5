"""Seeds, devices and how processes work together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tr_args.accelerator_config import AcceleratorConfig
from tr_args.config_file import ConfigFile
from tr_args.hints import OptionalSeed, Options, Seed
from tr_args.parallelism import ParallelSizes


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HardwareFields:
    """Seeds and devices."""

    _title = "Seeds and devices"

    seed: Seed = 42
    """Seed of all random numbers."""

    data_seed: OptionalSeed = None
    """Seed of the data's order. Unset is seed."""

    full_determinism: bool = False
    """Use only deterministic algorithms: the same bits in every run, slower."""

    use_cpu: bool = False
    """Train on the CPU even if there is another device."""

    strategy: str = "auto"
    """How to train: auto, single (one device), ddp, fsdp, or the name of an installed strategy."""

    accelerator_config: Annotated[AcceleratorConfig, ConfigFile()] = field(default_factory=AcceleratorConfig)
    """How data is shared among processes, as a mapping or a file, such as {"even_batches": false}."""

    parallelism_config: Annotated[Options, ParallelSizes()] = None
    """Over how many processes samples and shards are spread, such as {"dp_replicate_size": 2, "dp_shard_size": 4}."""

    skip_memory_metrics: bool = True
    """Do not add memory use to the metrics."""
