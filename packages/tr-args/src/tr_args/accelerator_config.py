"""How data is shared among processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class AcceleratorConfig:
    """How data is shared among processes.

    Attributes:
        split_batches: the given batch size is that of all processes together.
        dispatch_batches: the first process reads for all; None does so for data without a length.
        even_batches: repeat samples so that all processes have equally many batches.
        use_seedable_sampler: draw the order from the seed and the epoch alone.
        non_blocking: copy to the device without waiting.
        gradient_accumulation_kwargs: `num_steps`, `sync_each_batch`.
        use_configured_state: keep process state that was set up before.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False
