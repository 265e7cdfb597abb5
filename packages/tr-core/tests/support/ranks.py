"""Stand for the exchanges of ranks of which all say the same."""

from __future__ import annotations


class Alike:
    """The exchanges of this rank with others that give what it gives."""

    local_rank = 0

    def __init__(self, world_size=1, rank=0):
        self.rank, self.world_size = rank, world_size

    def gather_objects(self, value):
        return [value] * self.world_size

    def all_reduce_max(self, values):
        return lambda: list(values)
