"""Train one model in shards over the ranks: torch's `fully_shard` (FSDP2)."""

from tr_dist.fsdp.settings import Sharding
from tr_dist.fsdp.strategy import FSDP

__all__ = ["FSDP", "Sharding"]
