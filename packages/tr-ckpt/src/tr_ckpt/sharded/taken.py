"""Take the states of all parts at once, where some may hold DTensors, and let the ranks agree who writes what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tr_ckpt import parts
from tr_ckpt.errors import CheckpointError
from tr_ckpt.host_buffers import HostBuffers
from tr_ckpt.parts import CapturedPart
from tr_ckpt.ranks import Ranks
from tr_ckpt.sharded import planning
from tr_ckpt.sharded.capturing import TakenState, take


class TakenStates:
    """The states of one save.

    Args:
        ranks: this process among the others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._states: dict[str, Any] = {}
        self._taken: dict[str, TakenState] = {}
        self._shares: list[dict[str, Any]] = []

    def take(self, given: Mapping[str, Any], what: str) -> None:
        """Take the state of every part and exchange what each rank holds of those in shards, once for all of them.

        All ranks call it or none. No tensor is copied.

        Raises:
            Exception: what taking a state raised on this rank.
            SaveError: it failed on another one; the message begins with `what`.
        """

        def shares() -> dict[str, Any]:
            failure: Exception | None = None
            for name, part in given.items():
                try:
                    self._take(name, part)
                except Exception as error:  # other ranks go on to take the states that follow, and may wait for this
                    failure = failure or error
            if failure is not None:
                raise failure
            return {name: taken.share for name, taken in self._taken.items()}

        self._shares = self._ranks.together(what, shares)

    def _take(self, name: str, part: Any) -> None:
        state = part.state_dict()
        taken = take(name, self._ranks.rank, state) if name not in parts.PER_RANK else None
        if taken is None:
            self._states[name] = state
        elif self._ranks.is_one_of_several:
            raise CheckpointError(
                f"{name} is held in shards, of which no machine has all; save to a file system that every machine "
                "sees, without save_on_each_node"
            )
        else:
            self._taken[name] = taken

    def capture(self, name: str, part: Any, buffers: HostBuffers | None) -> CapturedPart | None:
        """Take what this rank writes of a part, as `parts.capture` does; communicates nothing.

        Raises:
            CheckpointError: the state holds something that cannot be saved, or the ranks do not hold the same.
        """
        if any(name in held for held in self._shares):
            held = [shares.get(name) for shares in self._shares]
            planning.agreed(name, held)  # also where this rank holds none
            return self._taken.pop(name).capture(held, buffers)
        # On every rank: taking a state may need all of them.
        state = self._states.pop(name) if name in self._states else part.state_dict()
        ranks = self._ranks
        return parts.capture(name, ranks.number if name in parts.PER_RANK else ranks.rank, state, buffers)
