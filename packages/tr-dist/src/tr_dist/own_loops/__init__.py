"""Distribute a loop written by hand: `Loop` and its prepared loaders, optimizers and schedules."""

from tr_dist.own_loops.loop import Loop

__all__ = ["Loop"]
