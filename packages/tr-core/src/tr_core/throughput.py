"""Measure the rates of training between two logs: samples, tokens and operations per second, MFU, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from tr_core.data.sampler import MicroBatch
from tr_core.flops import ModelFacts, look_at, num_positions, num_targets, peak_flops, peak_of_environment
from tr_core.model_io import batch_size_of
from tr_core.runtime.memory import memory_in_use
from tr_core.step_scope import StepScope
from tr_log.phases import START, PhaseClock


class Share(NamedTuple):
    """What one rank adds to the rates of a log.

    Attributes:
        samples: samples that only this rank knows of.
        positions: positions of this rank's inputs.
        memory_bytes: what is allocated now on the fullest of its devices; None if unknown.
        peak_flops: peak of its devices together, in operations per second; None if unknown.
    """

    samples: int
    positions: int
    targets: int
    memory_bytes: int | None
    memory_peak_bytes: int | None
    peak_flops: float | None


class Throughput:
    """Count what is trained on between two logs, and make rates of it.

    A log's rates are those of the steps since the last log, of all ranks together. Their time is that of training:
    loading data, computing, exchange, and what callbacks take, but no evaluation and no save. Tokens are positions of
    the main input, padding included, unless a run counts tokens itself (`include_num_input_tokens_seen`).

    Attributes:
        own_samples: samples that only this rank knows of, of a user's loader.
        targets: positions of this rank's inputs of a decoder that has an encoder beside it.
    """

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._since_s, self._tokens_seen = clock.training_s, 0
        self._facts = ModelFacts(None, 0.0, frozenset(), None)
        self._looked_at: tuple[nn.Parameter, ...] = ()  # no list: a step may be repeated from a copy of lists
        self._trained: tuple[bool, ...] = ()
        self._input_name = ""
        self._counted: tuple[float, float] | None = None  # operations for one position, and for one sample
        self.samples = self.own_samples = self.positions = self.targets = 0

    @property
    def has_counted(self) -> bool:
        """Whether the operations of a micro-batch were counted."""
        return self._counted is not None

    def begin(self, tokens_seen: int) -> None:
        """Begin the first window, with the tokens seen so far in the whole run.

        Raises:
            ValueError: the environment variable for the peak of a device is not a positive number.
        """
        peak_of_environment()  # not only at the first log
        self._since_s, self._tokens_seen = self._clock.training_s, tokens_seen

    def forget_model(self) -> None:
        """Look at the model again at the next log: its parameters may be others."""
        self._looked_at = ()

    def counter(self, input_name: str, *, with_targets: bool = False) -> Callable[[MicroBatch], None]:
        """Return what counts the positions of micro-batches; fillers, with which a rank only takes part, have none."""
        self._input_name = input_name

        def count(batch: MicroBatch) -> None:
            if batch.weight != 0.0:
                self.positions += num_positions(batch.inputs, input_name)
                self.targets += num_targets(batch.inputs, input_name) if with_targets else 0

        return count

    def count_own(self, batch: MicroBatch) -> None:
        """Count a micro-batch of which each rank knows only its own samples."""
        self.own_samples += batch_size_of(batch.inputs) or 0

    @contextmanager
    def counting(self, inputs: Any, scope: StepScope, device: torch.device) -> Iterator[None]:
        """Count the operations of the micro-batch that is trained on in the block. Sync.

        The rates have neither its time nor its samples. The sum is divided by its positions, or by its samples if it
        has no positions.
        """
        from torch.utils.flop_counter import FlopCounterMode  # few runs ask for it

        outer = self._clock.switch(START)
        try:
            # What is compiled runs as written here: the counter sees no compiled code.
            with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
                yield
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        finally:
            self._clock.switch(outer)
        own, positions = batch_size_of(inputs) or 0, num_positions(inputs, self._input_name)
        operations = counter.get_total_flops()
        self._counted = (operations / positions, 0.0) if positions else (0.0, operations / max(own, 1))
        self.samples -= scope.total or 0  # they are added after the block
        self.own_samples -= own if scope.total is None else 0
        self.positions -= positions if scope.weight != 0.0 else 0

    def share(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype | None,
        given_peak: float | None,
        together: int = 1,
        whole: ModelFacts | None = None,
    ) -> Share:
        """Return what this rank, or each of so many that compute its samples together, adds to the rates. No sync.

        Args:
            model: as this rank has it.
            device: of this rank.
            dtype: in which it computes; None is that of the parameters.
            given_peak: of a device, if the user gives it.
            together: number of ranks that compute its samples together.
            whole: what the model is, if this rank has some of its layers alone.
        """
        trained = tuple(parameter.requires_grad for parameter in self._looked_at)
        if not trained or trained != self._trained:  # a walk over a large model takes half a millisecond
            self._facts, self._looked_at = whole or look_at(model), tuple(model.parameters())
            self._trained = tuple(parameter.requires_grad for parameter in self._looked_at)
        devices = [each for each in self._facts.devices if each.type == device.type] or [device]
        peaks = [peak_flops(each, dtype or self._facts.dtype, given_peak) for each in devices]
        known = [peak for peak in peaks if peak is not None]
        together = together if self._counted is None else 1  # this rank's own operations were counted
        peak = sum(known) * together if known and len(known) == len(peaks) else None
        return Share(self.own_samples, self.positions, self.targets, *memory_in_use(devices), peak)

    def close(self, shares: Sequence[Share], tokens_seen: int | None) -> None:
        """Give the clock the rates since the last log, and begin a new window."""
        now_s = self._clock.training_s
        seconds, self._since_s = now_s - self._since_s, now_s
        samples = self.samples + sum(share.samples for share in shares)
        positions = sum(share.positions for share in shares)
        targets, tokens = sum(share.targets for share in shares), positions
        if tokens_seen is not None:
            tokens, self._tokens_seen = tokens_seen - self._tokens_seen, tokens_seen
        self.samples = self.own_samples = self.positions = self.targets = 0
        if samples > 0:  # else nothing was trained on since the last log
            flops = (self._facts.per_position or 0.0) * positions + self._facts.per_target * targets
            if self._counted is not None:
                flops = self._counted[0] * positions + self._counted[1] * samples
            counts = {"samples": samples, "tokens": tokens, "flops": flops}
            rates = {f"{unit}_per_second": n / seconds for unit, n in counts.items() if n > 0 and seconds > 0}
            self._clock.rates = rates | _mfu(rates, shares) | _fullest(shares)


def _mfu(rates: dict[str, float], shares: Sequence[Share]) -> dict[str, float]:
    known = [share.peak_flops for share in shares if share.peak_flops is not None]
    if "flops_per_second" not in rates or not known or len(known) < len(shares):
        return {}
    return {"mfu": rates["flops_per_second"] / sum(known)}


def _fullest(shares: Sequence[Share]) -> dict[str, float]:
    now = [share.memory_bytes for share in shares if share.memory_bytes is not None]
    peaks = [share.memory_peak_bytes for share in shares if share.memory_peak_bytes is not None]
    figures = {"memory_bytes": max(now, default=None), "memory_peak_bytes": max(peaks, default=None)}
    return {name: value for name, value in figures.items() if value is not None}
