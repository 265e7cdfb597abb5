"""Check `accelerator_config`: what of it acts, and why the rest is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_REFUSED = {
    "dispatch_batches": (
        (None, False),
        "each rank reads its own share of every micro-batch, and the place in the data is a count of samples that all "
        "ranks share; leave it out",
    ),
    "even_batches": (
        (True,),
        "every rank takes part in every step, and no sample counts twice: a rank left without one adds nothing; leave "
        "it out",
    ),
    "use_seedable_sampler": (
        (True,),
        "the order of the data follows from seed and epoch alone, or a run could not be resumed; leave it out",
    ),
    "use_configured_state": (
        (False,),
        "there is no state of the process to keep: a process group that exists is used in any case; leave it out",
    ),
}
_ACCUMULATION = ("num_steps", "sync_each_batch")


def check_accelerator_config(args: Any, world_size: int) -> None:
    """Raise for settings that cannot be, all at once.

    `split_batches` divides the given batch sizes by the number of ranks, `non_blocking` is how batches are always
    copied, and `gradient_accumulation_kwargs["sync_each_batch"]` has gradients exchanged after every micro-batch.

    Args:
        args: the training arguments.
        world_size: number of ranks.

    Raises:
        ValueError: the message names each with the reason.
    """
    if problems := list(_problems(args, world_size)):
        raise ValueError("accelerator_config cannot be used as it is:\n" + "\n".join(f"  {p}" for p in problems))


def syncs_each_batch(args: Any) -> bool:
    """Whether gradients are to be exchanged after every micro-batch, and not after the last of a step only."""
    return bool((args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch", False))


def _problems(args: Any, world_size: int) -> Iterator[str]:
    config = args.accelerator_config
    for name, (accepted, reason) in _REFUSED.items():
        if (value := getattr(config, name)) not in accepted:
            yield f"{name}={value!r}: {reason}"
    if config.split_batches:
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            if (size := getattr(args, name)) % world_size:
                yield (
                    f"split_batches=True: {name}={size} cannot be divided among {world_size} processes; make it a "
                    "multiple of their number"
                )
    accumulation = config.gradient_accumulation_kwargs or {}
    if unknown := sorted(set(accumulation) - set(_ACCUMULATION)):
        yield f"gradient_accumulation_kwargs has {unknown}; it takes {list(_ACCUMULATION)}"
    steps = accumulation.get("num_steps", args.gradient_accumulation_steps)
    if steps != args.gradient_accumulation_steps:
        yield (
            f"gradient_accumulation_kwargs has num_steps={steps!r}, but gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}; set only the latter"
        )
    if not isinstance(sync := accumulation.get("sync_each_batch", False), bool):
        yield f"gradient_accumulation_kwargs has sync_each_batch={sync!r}; it needs true or false"
