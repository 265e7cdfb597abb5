"""Train one model in shards by torch's older way, `FullyShardedDataParallel` (FSDP1), for what only that has."""

from tr_dist.fsdp1.strategy import FSDP1

__all__ = ["FSDP1"]
