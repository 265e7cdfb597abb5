"""The whole training stack: Trainer, arguments, logging, checkpoints, optimizers and distribution."""
