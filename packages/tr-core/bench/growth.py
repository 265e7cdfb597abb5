"""Show what grows with the rows of the data, with the position in them, and with the number of ranks.

Bytes and calls are counted; times are the processor's for this process, so other programs count little. Ranks are
simulated: torch's fake process group transfers nothing, and the other ranks count as equal to the one that runs.

Run: python packages/tr-core/bench/growth.py [rows] [positions] [ranks] [--json FILE]

`ranks` needs tr-dist.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import IterableDataset

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.data.fetch import StreamFetch
from tr_core.data.sampler import EpochSampler
from tr_log import EventsFile

COMMAND = "python packages/tr-core/bench/growth.py"
BATCH = 8
STRATEGIES = ("random", "random_computed", "sequential")


@dataclass(frozen=True)
class Row:
    """One cost at several sizes.

    Attributes:
        cost: what is measured, with its unit.
        by: what the sizes are.
        values: the cost by size.
        command: shows it.
    """

    cost: str
    by: str
    values: dict[int, float]
    command: str


def sampler_of(number: int, strategy: str, position: int = 0) -> EpochSampler:
    """Return the batch sampler of one process at a position."""
    sampler = EpochSampler(
        number, BATCH, shuffle=strategy != "sequential", computed=strategy == "random_computed", seed=0
    )
    sampler.seek(0, position)
    return sampler


def order_bytes(sampler: EpochSampler) -> int:
    """Return the bytes that the order of an epoch holds once its first batch was taken: of torch and of Python."""
    tracemalloc.start()
    order = sampler.order()
    order[: sampler.batch_size]
    of_python = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return of_python + getattr(order, "nbytes", 0)  # memory of torch is not traced


def first_batch_ms(sampler: EpochSampler, rounds: int) -> float:
    """Return the processor time until the first batch of indices is there."""
    times = []
    for _ in range(rounds):
        began_s = time.process_time()
        next(iter(sampler))
        times.append((time.process_time() - began_s) * 1e3)
    return statistics.median(times)


def rows(sizes: list[int], rounds: int) -> Iterator[Row]:
    """Measure orders of more and more rows."""
    for strategy in STRATEGIES:
        samplers = {number: sampler_of(number, strategy) for number in sizes}
        command = f"{COMMAND} rows"
        yield Row(f"order, {strategy}: bytes", "rows", {n: order_bytes(s) for n, s in samplers.items()}, command)
        times = {number: first_batch_ms(sampler, rounds) for number, sampler in samplers.items()}
        yield Row(f"first batch, {strategy}: ms", "rows", times, command)


class Stream(IterableDataset[int]):
    """Counts the samples that are read; `knows` is whether it can tell and restore its position."""

    def __init__(self, knows: bool) -> None:
        self.place, self.read = 0, 0
        if knows:
            self.state_dict = lambda: {"place": self.place}
            self.load_state_dict = lambda state: setattr(self, "place", state["place"])

    def __iter__(self) -> Iterator[int]:
        while True:
            self.place, self.read = self.place + 1, self.read + 1
            yield self.place


def read_to(position: int, knows: bool) -> int:
    """Return the samples of a stream that a resume at `position` reads before its first new one."""
    from tr_core.data.batches import batches_of
    from tr_core.data.loaders import StreamLoader

    data = Stream(knows)
    batches = batches_of(StreamLoader(StreamFetch(data, list, BATCH, seed=0)), BATCH, 1)
    if knows:
        batches.restore_source([{"place": position}], 0, 1)
    next(iter(batches.iterate(0, position)))
    return data.read - BATCH


def positions(places: list[int], rounds: int) -> Iterator[Row]:
    """Measure the first batch after a resume, at positions further and further into a pass."""
    command, number = f"{COMMAND} positions", 4 * max(places)
    for strategy in ("random_computed", "sequential"):
        times = {place: first_batch_ms(sampler_of(number, strategy, place), rounds) for place in places}
        yield Row(f"first batch after a resume, {strategy}, {number:.0e} rows: ms", "position", times, command)
    few = [place for place in places if place <= 10**5]
    for knows, words in ((True, "with a state_dict"), (False, "without one")):
        read = {place: read_to(place // BATCH * BATCH, knows) for place in few}
        yield Row(f"samples read again at a resume, iterable data {words}", "position", read, command)


# Ranks


class Rows:
    """Rows that are made when asked for."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((8,), float(index % 7)), "labels": torch.tensor(index % 2)}


class Small(nn.Module):
    """Two classes of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@dataclass
class RankCosts:
    """What one rank does: calls of functions and bytes allocated in a step without a log, and what a log takes.

    Attributes:
        step_calls: calls of Python and C functions from the beginning of a step to its end.
        step_bytes: most bytes of Python objects that a step allocates.
        log_sent_bytes: bytes that this rank gives to an exchange at a log; it receives as many of each rank.
        log_ms: processor time of a log.
        save_bytes: bytes of the log windows of all ranks, pickled, in a checkpoint.
    """

    step_calls: int = 0
    step_bytes: int = 0
    log_sent_bytes: int = 0
    log_ms: float = 0.0
    save_bytes: int = 0


LOG_EVERY = 6


class Watch(TrainerCallback):
    """Counts a step of the first window, and times the log at its end."""

    def __init__(self) -> None:
        self.costs, self.began_s = RankCosts(), 0.0
        self.trainer: Trainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # torch's own reduction needs a result of the exchange, and the fake group gives none.
        assert self.trainer is not None
        self.trainer.model_wrapped.register_comm_hook(None, lambda state, bucket: _as_it_is(bucket))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == LOG_EVERY - 3:
            sys.setprofile(self._count)
        elif state.global_step == LOG_EVERY - 2:
            tracemalloc.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(None)
        if tracemalloc.is_tracing():
            self.costs.step_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == LOG_EVERY and not self.costs.log_ms:
            self.costs.log_ms = (time.process_time() - self.began_s) * 1e3

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.costs.step_calls += event in ("call", "c_call")


def _as_it_is(bucket: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def rank_costs(world_size: int) -> RankCosts:
    """Return the costs of the last rank of a DDP run of that many, on machines of 8."""
    from tr_dist import DDP
    from tr_dist.fake_ranks import fake_rank
    from tr_dist.process_group import ProcessGroup

    watch, sent = Watch(), 0

    def gather_objects(group: Any, value: Any) -> list[Any]:
        nonlocal sent
        text = pickle.dumps(value)
        sent = len(text)
        return [pickle.loads(text) for _ in range(group.world_size)]

    local = min(world_size, 8)
    with tempfile.TemporaryDirectory() as folder, fake_rank(world_size - 1, world_size, local_world_size=local):
        options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        arguments = TrainingArguments(
            folder, max_steps=LOG_EVERY, logging_steps=LOG_EVERY, per_device_train_batch_size=4, **options
        )
        arguments.train_sampling_strategy = "random_computed"
        with DDP(use_cpu=True) as strategy, mock.patch.object(ProcessGroup, "gather_objects", gather_objects):
            trainer = Trainer(Small(), arguments, train_dataset=Rows(10**9), callbacks=[watch], strategy=strategy)
            watch.trainer = trainer
            trainer.remove_callback(EventsFile)  # it writes by the clock
            with _closing(trainer, watch, lambda: sent):
                trainer.train()
    return watch.costs


def _closing(trainer: Trainer, watch: Watch, sent: Callable[[], int]) -> Any:
    """Note what the log of the last step exchanged, and how large the windows of a save are."""
    from tr_core.run import Run

    close_window, collect = Run.close_window, Run.collect_window

    def closed(run: Run) -> Any:
        collect(run, trainer.state)
        watch.costs.save_bytes = len(pickle.dumps(run.window.of_all_ranks))
        watch.began_s = time.process_time()
        found = close_window(run)
        watch.costs.log_sent_bytes = watch.costs.log_sent_bytes or sent()
        return found

    return mock.patch.object(Run, "close_window", closed)


def ranks(sizes: list[int], rounds: int) -> Iterator[Row]:
    """Measure one rank of more and more."""
    rank_costs(2)  # imports and caches
    found: dict[int, list[RankCosts]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            found[size].append(rank_costs(size))
    words = {
        "step_calls": "step: calls of functions",
        "step_bytes": "step: bytes of Python objects",
        "log_sent_bytes": "log: bytes given to the exchange",
        "log_ms": "log: ms",
        "save_bytes": "save: bytes of the log windows of all ranks",
    }
    for name, cost in words.items():
        values = {size: statistics.median(getattr(each, name) for each in found[size]) for size in sizes}
        yield Row(cost, "ranks", values, f"{COMMAND} ranks")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="rows, positions, ranks (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[10**4, 10**6, 10**7], help="numbers of rows")
    parser.add_argument("--positions", type=int, nargs="+", default=[10**3, 10**5, 10**9], help="positions in a pass")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5, help="times that each is measured (default 5); medians")
    parser.add_argument("--json", metavar="FILE", help="write the result to a file too")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread, CPU"
    print(f"{machine}; medians of {options.rounds}\n")
    measure = {"rows": rows, "positions": positions, "ranks": ranks}
    found = []
    for what in options.what or measure:
        table = list(measure[what](getattr(options, what), options.rounds))
        report(table)
        found += table
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rounds": options.rounds, "rows": [asdict(row) for row in found]}, file)


def report(table: list[Row]) -> None:
    """Print a table."""
    sizes = list(dict.fromkeys(size for row in table for size in row.values))
    print(f"{table[0].by:62}" + "".join(f"{size:>16,}" for size in sizes) + "  command")
    for row in table:
        values = (f"{row.values[size]:,.3f}".rstrip("0").rstrip(".") if size in row.values else "" for size in sizes)
        print(f"  {row.cost:60}" + "".join(f"{value:>16}" for value in values) + f"  {row.command}")
    print(flush=True)


if __name__ == "__main__":
    main()
