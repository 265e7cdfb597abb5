"""Distribute a loop written by hand: `Loop` and what it makes of loaders, optimizers and schedules."""

from tr_dist.own_loops.loop import Loop

__all__ = ["Loop"]
