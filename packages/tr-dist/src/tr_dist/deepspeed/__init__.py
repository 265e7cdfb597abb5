"""Train with DeepSpeed's engine: ZeRO 0 to 3, optionally with optimizer state and parameters in host memory."""

from tr_dist.deepspeed.strategy import DeepSpeed

__all__ = ["DeepSpeed"]
