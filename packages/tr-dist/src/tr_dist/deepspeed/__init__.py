"""Train with DeepSpeed's engine: ZeRO 0 to 3, with optimizer state and parameters in host memory if wished."""

from tr_dist.deepspeed.strategy import DeepSpeed

__all__ = ["DeepSpeed"]
