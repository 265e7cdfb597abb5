"""Meet the processes of a job that goes on when one is lost, or comes back (`trainer launch --elastic`).

Torch's dynamic rendezvous does the meeting: a round of it is the processes that train together, and each process takes
part by itself. The store is that of the launcher, which outlives all of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from tr_dist.environment import LaunchEnvironment

RUN = "TR_ELASTIC_RUN"
"""Variable with the name of a run whose processes come and go; the launcher sets it."""

_POLL_S = 1.0
# A process without a heartbeat for three seconds is lost; the others come within three of the first.
_SETTINGS = {"keep_alive_interval": "1", "keep_alive_max_attempt": "3", "last_call_timeout": "3", "is_host": "false"}


@dataclass(frozen=True)
class Round:
    """The processes that train together: where they exchange, and the place of this one.

    Attributes:
        store: for this round alone.
        rank: of this process; processes are in the order of the launcher's numbers.
        world_size: number of processes.
    """

    store: dist.Store
    rank: int
    world_size: int


class RunEndedError(RuntimeError):
    """The run ended while this process began."""


class Meeting:
    """This process among those of a run that come and go.

    Args:
        environment: identifies this process; its number of processes is the most that there may be.
        timeout_s: seconds to wait for a round.
    """

    def __init__(self, environment: LaunchEnvironment, timeout_s: float) -> None:
        rendezvous.register_default_handlers() if not _is_known() else None
        self._number = environment.rank
        self._handler: Any = rendezvous.get_rendezvous_handler(
            RendezvousParameters(
                backend="c10d",
                endpoint=f"{environment.master_addr}:{environment.master_port}",
                run_id=os.environ[RUN],
                min_nodes=1,
                max_nodes=environment.world_size,
                join_timeout=str(int(timeout_s)),
                **_SETTINGS,
            )
        )
        self._is_watched, self.is_awaited = False, False

    @classmethod
    def of(cls, environment: LaunchEnvironment, timeout_s: float, environ: Mapping[str, str]) -> Meeting | None:
        """Return the meeting that the launcher's variables describe; None where processes do not come and go."""
        return cls(environment, timeout_s) if environ.get(RUN) else None

    def join(self) -> Round:
        """Wait for the next round, leaving that of before.

        Raises:
            RunEndedError: the run has ended.
        """
        try:
            found = self._handler.next_rendezvous()
        except RendezvousClosedError:
            raise RunEndedError("the run has ended while this process was starting; there is nothing to do") from None
        found.store.set(f"number_{found.rank}", str(self._number))
        numbers = [int(found.store.get(f"number_{rank}")) for rank in range(found.world_size)]
        self.is_awaited = False
        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._watch, name="who waits", daemon=True).start()
        return Round(found.store, sorted(numbers).index(self._number), found.world_size)

    def end(self) -> None:
        """Let no process come any more."""
        self._is_watched = False
        self._handler.shutdown()

    def _watch(self) -> None:
        stop = threading.Event()
        while self._is_watched:
            try:
                self.is_awaited = self._handler.num_nodes_waiting() > 0
            except Exception:
                return  # the launcher is gone, and ends this process
            stop.wait(_POLL_S)
