"""Average logged metrics over a window of steps and over all ranks, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tr_core.data.virtual_shards import on_grid
from tr_core.protocols import Collectives

# Name -> weighted sum of its values, and sum of their weights.
Sums = dict[str, tuple[float, float]]

# Names that log entries use already: those of training, of the final entry, and of evaluations after their prefix.
RESERVED_NAMES = frozenset(
    {
        "loss",
        "grad_norm",
        "learning_rate",
        "epoch",
        "step",
        "skipped_steps",
        "num_input_tokens_seen",
        "total_flos",
        "train_loss",
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
        "train_tokens_per_second",
        "runtime",
        "samples_per_second",
        "steps_per_second",
        "model_preparation_time",
    }
)


class MetricWindow:
    """Accumulate weighted means of named scalars since the last log.

    A tensor stays on its device until the window is read.

    Args:
        collectives: this process among those with other samples.
        is_exact: whether sums do not depend on the order of what is added, which is rounded for that; see `on_grid`.

    Attributes:
        holds_back: whether parts of a step's loss wait for a later call, which gets whether the step counts.
    """

    def __init__(self, collectives: Collectives, *, is_exact: bool = False) -> None:
        self._collectives, self._is_exact = collectives, is_exact
        self.holds_back = False
        self._held: list[tuple[str, torch.Tensor, float]] = []
        self._on_host: dict[str, list[float]] = {}
        self._on_device: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, value: Any, weight: Any = 1.0) -> None:
        """Add a value of a metric. Value and weight: each a number or a tensor with one element.

        Raises:
            ValueError: the name is taken or no name, the value is not a scalar, or the weight is negative.
            TypeError: value or weight is not a number.
        """
        check_name(name)
        scalar, factor = _scalar(name, "value", value), _scalar(name, "weight", weight)
        if isinstance(factor, float) and not 0 <= factor < math.inf:
            raise ValueError(f"log_metric({name!r}) was given weight={weight!r}; a weight is finite and not negative")
        if isinstance(factor, float) and factor in (0.0, 1.0):
            return self.add_sum(name, scalar, factor) if factor else None
        if isinstance(scalar, torch.Tensor):
            scalar = scalar.to(accumulator_dtype(scalar.device))  # a 16-bit product would be rounded
        return self.add_sum(name, scalar * factor, factor)

    def add_sum(self, name: str, total: float | torch.Tensor, weight: float | torch.Tensor) -> None:
        """Add a weighted sum of values and the sum of their weights."""
        for index, number in enumerate((total, weight)):
            if self._is_exact:
                rounded = on_grid(torch.as_tensor(number, dtype=torch.float64))
                number = rounded if isinstance(number, torch.Tensor) else rounded.item()
            if isinstance(number, torch.Tensor):
                self._device_sums(name)[index].add_(number.detach())
            else:
                self._on_host.setdefault(name, [0.0, 0.0])[index] += number

    def add_part(self, name: str, share: torch.Tensor, size: int) -> None:
        """Add a part of a loss: one of `size` shares, over all ranks, that add up to a step's value."""
        if self.holds_back:
            self._held.append((name, share, 1 / size))
        else:
            self.add_sum(name, share, 1 / size)

    def flush(self, skip: torch.Tensor) -> None:
        """Add the held parts of a step, unless a flag on the device marks the step as skipped."""
        counts = skip.logical_not()
        for name, share, weight in self._held:
            self.add_sum(name, torch.where(skip, 0.0, share), counts * weight)
        self._held.clear()

    def read(self) -> Sums:
        """Return this rank's sums. Sync: one read of the device, if the window holds tensors."""
        sums = {name: (total, weight) for name, (total, weight) in self._on_host.items()}
        tensors = list(self._on_device.items())
        numbers = iter(read_scalars([tensor for _, pair in tensors for tensor in pair]))
        for (name, _), total, weight in zip(tensors, numbers, numbers, strict=True):
            on_host = sums.get(name, (0.0, 0.0))
            sums[name] = (on_host[0] + total, on_host[1] + weight)
        return sums

    def clear(self) -> None:
        """Begin a new window."""
        self._on_host.clear()
        self._on_device.clear()
        self._held.clear()

    def load(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Restore a window that was read earlier."""
        self.clear()
        self._on_host.update({name: [float(total), float(weight)] for name, (total, weight) in sums.items()})

    def means(self) -> dict[str, float]:
        """Compute the means over the windows of all ranks. Collective."""
        return weighted_means(self._collectives.gather_objects(self.read()))

    def _device_sums(self, name: str) -> list[torch.Tensor]:
        if name not in self._on_device:
            device = self._collectives.device
            # Plain tensors, also in inference mode: they are updated outside inference mode too.
            with torch.inference_mode(mode=False):
                zeros = [torch.zeros((), dtype=accumulator_dtype(device), device=device) for _ in range(2)]
            self._on_device[name] = zeros
        return self._on_device[name]


def weighted_means(sums_of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return each name's mean over all ranks; a rank may lack a name, and names without weight are skipped."""
    total: dict[str, list[float]] = {}
    for sums in sums_of_ranks:
        for name, (value, weight) in sums.items():
            entry = total.setdefault(name, [0.0, 0.0])
            entry[0] += value
            entry[1] += weight
    return {name: value / weight for name, (value, weight) in total.items() if weight != 0}


def check_name(name: str) -> None:
    """Raise unless a metric may have this name."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of a metric is a text, not {name!r}")
    if name in RESERVED_NAMES:
        raise ValueError(
            f"{name!r} cannot be the name of a metric: entries of the log have a value of that name already; choose "
            f"another than {', '.join(sorted(RESERVED_NAMES))}"
        )


def _scalar(name: str, role: str, value: Any) -> float | torch.Tensor:
    """Return a float, or a detached tensor without dimensions."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"log_metric({name!r}) was given a {role} of shape {tuple(value.shape)}; it needs a number or a tensor "
                "with one element, as .mean() gives"
            )
        return value.detach().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"log_metric({name!r}) was given {role}={value!r}; it needs a number or a tensor with one element"
        ) from error


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: 64 bits if the device has them."""
    return torch.float32 if device.type == "mps" else torch.float64


def read_scalars(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Read scalar tensors of one device in one transfer.

    32-bit values are exact; whole numbers are exact up to 2**53 (2**24 on MPS, which has no 64-bit floats).
    """
    if not scalars:
        return []
    dtype = accumulator_dtype(scalars[0].device)
    return torch.stack([scalar.detach().reshape(()).to(dtype) for scalar in scalars]).tolist()  # sync: once a call
