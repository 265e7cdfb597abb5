"""Meet the processes of a run that goes on when some are lost, or come back (`trainer launch --elastic`).

Torch's dynamic rendezvous does the meeting: a round of it is the processes that train together, and each process takes
part by itself. The store is that of the launcher, which outlives all of them.
"""

from __future__ import annotations

import gc
import io
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from tr_dist.environment import ELASTIC_RUN, LaunchEnvironment
from tr_dist.process_group import ProcessGroup, here
from tr_log import get_logger

_logger = get_logger(__name__)

ENDED = "tr-run-ended"
"""Key in the launcher's store once the run has ended: a process that fails later is not started again."""

_ROUNDS = "tr-rounds"  # key with the number of rounds so far
# A process without a heartbeat for five seconds is lost. Others get three after the first has come.
_SETTINGS = {
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "5",
    "last_call_timeout": "3",
    "read_timeout": "10",
    "is_host": "false",
}
_POLL_S, _LOOK_S = 0.05, 1.0
_NUMBERS_S = 10.0
_ATTEMPTS = 5  # a process may be lost while a round begins; five in a row are another fault
_SEEN_S = 5.0  # how long after an error the watch may see who is gone


class Members:
    """The processes that train together now, with this one among them.

    Args:
        strategy: what exchanges with the others; alone until `meet`.
        join: makes it exchange with the processes of an environment, which have met at a store.
        launched: this process as the launcher numbers it, and the most processes that there may be.
        timeout_s: seconds to wait for a round.

    Attributes:
        is_awaited: whether a process waits to be taken in, or others went on without this one, whose heartbeats came
            too late. It is read in a thread, once a second.
        is_over: whether the run has ended.
    """

    def __init__(
        self,
        strategy: ProcessGroup,
        join: Callable[[LaunchEnvironment, dist.Store], None],
        launched: LaunchEnvironment,
        timeout_s: float,
    ) -> None:
        self._strategy, self._join, self._launched, self._timeout_s = strategy, join, launched, timeout_s
        self._handler: Any = None
        self._store: Any = None
        self._round = 0
        self.is_awaited, self.is_over = False, False

    def meet(self) -> None:
        """Exchange with the processes that there are now, in place of those of before.

        Raises:
            SystemExit: the run ended while this process started.
            RuntimeError: this process trained to the end before.
            ConnectionError: no round could begin.
        """
        if self.is_over:
            raise RuntimeError(
                "trainer launch --elastic takes in processes until train() has ended once, and it was called again; "
                "start each run by itself, or without --elastic"
            )
        self._round = 0
        for attempt in range(_ATTEMPTS):
            self._leave(failed=attempt > 0 or bool(self._strategy.lost_ranks()))
            try:
                found = self._next_round()
                rank = self._place_in(found)
                store = dist.PrefixStore(f"round_{self._round}", self._store)
                self._join(replace(self._launched, rank=rank, world_size=found.world_size), store)
            except (RuntimeError, ConnectionError) as error:
                _logger.warning("a process was lost while they met: %s", str(error).partition("\n")[0])
                continue
            self.is_awaited = False
            if rank == 0:
                _logger.info("%d of at most %d processes train together", found.world_size, self._launched.world_size)
            return
        raise ConnectionError(f"processes met {_ATTEMPTS} times and could not exchange; the warnings above say why")

    def _leave(self, *, failed: bool) -> None:
        if not failed and dist.is_initialized():
            with suppress(RuntimeError):  # one may be lost now
                self._strategy.barrier()
        here.leave_watch()  # before the group, whose failure it would report
        self._strategy.leave(failed=True)
        here.release_left()  # others who wait for this process see it go
        gc.collect()  # exceptions may hold groups in cycles

    def lost_a_rank(self) -> bool:
        """Whether a process of the round is gone; waits for seconds until that can be known."""
        until_s = time.monotonic() + _SEEN_S
        while not (lost := self._strategy.lost_ranks()) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        for rank, why in lost.items():
            _logger.warning("rank %d of %d is lost (%s)", rank, self._strategy.world_size, why)
        return bool(lost)

    def share(self, value: Any, source: int) -> Any:
        """Return the value of one rank on all, with its tensors on each rank's device. Collective; through the host."""
        is_source, buffer = self._strategy.rank == source, io.BytesIO()
        if is_source:
            torch.save(value, buffer)
        size = torch.tensor(buffer.tell())
        dist.broadcast(size, source)
        sent = torch.empty(int(size), dtype=torch.uint8)
        if is_source:
            sent = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        dist.broadcast(sent, source)
        if is_source:
            return value
        places = {f"cuda:{index}": str(self._strategy.device) for index in range(torch.cuda.device_count())}
        return torch.load(io.BytesIO(sent.numpy().tobytes()), map_location=places, weights_only=False)

    def end(self) -> None:
        """Let no process come any more."""
        self.is_over = True
        self._store.set(ENDED, "yes")
        self._handler.shutdown()

    def _next_round(self) -> Any:
        """Wait for the next round, and return what torch says of it."""
        if self._handler is None:
            self._handler = rendezvous.get_rendezvous_handler(
                RendezvousParameters(
                    backend="c10d",
                    endpoint=f"{self._launched.master_addr}:{self._launched.master_port}",
                    run_id=os.environ[ELASTIC_RUN],
                    min_nodes=1,
                    max_nodes=self._launched.world_size,
                    join_timeout=str(int(self._timeout_s)),
                    **_SETTINGS,
                )
            )
            host, port = self._launched.master_addr, self._launched.master_port
            self._store = dist.TCPStore(cast("str", host), cast("int", port), is_master=False, wait_for_workers=False)
            threading.Thread(target=self._watch, name="who waits", daemon=True).start()
        try:
            found = self._handler.next_rendezvous()
        except RendezvousClosedError:
            _logger.warning("the run ended while this process started: there is nothing left to do")
            raise SystemExit(0) from None
        return found

    def _place_in(self, found: Any) -> int:
        """Return this process's rank in a round, in the order of the launcher's numbers."""
        keys, number = [f"number_{rank}" for rank in range(found.world_size)], str(self._launched.rank)
        found.store.set(keys[found.rank], number)
        if found.rank == 0:
            found.store.set(_ROUNDS, str(self._store.add(_ROUNDS, 1)))
        until_s = time.monotonic() + _NUMBERS_S
        while not found.store.check([*keys, _ROUNDS]):  # a wait would hold back the heartbeats, of the same connection
            if time.monotonic() > until_s:
                raise ConnectionError(f"one of {found.world_size} processes did not come within {_NUMBERS_S:g} s")
            time.sleep(_POLL_S)
        self._round = int(found.store.get(_ROUNDS))
        return sorted(map(int, found.store.multi_get(keys))).index(int(number))

    def _watch(self) -> None:
        while not self.is_over:
            time.sleep(_LOOK_S)
            number = self._round
            try:
                is_left_behind = self._store.add(_ROUNDS, 0) > number
                is_awaited = is_left_behind or self._handler.num_nodes_waiting() > 0
            except Exception:
                return  # the launcher is gone, and ends this process
            if number == self._round > 0:  # not while processes meet
                self.is_awaited = is_awaited
