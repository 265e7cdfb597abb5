"""Refuse what would change the order of the data in the middle of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tr_core.resuming.settings import SAMPLES, Difference

if TYPE_CHECKING:
    from tr_core.run import Run
    from tr_core.trainer import Trainer

_ORDER = ("data_seed", "train_sampling_strategy", "overfit_batches", "length_column_name", SAMPLES)


def settle_order(
    trainer: Trainer, run: Run, saved: Mapping[str, Any], differences: Sequence[Difference]
) -> dict[str, str]:
    """Return what becomes of changed arguments that the order of the data depends on, by their names.

    Between two passes they are applied. A pass that was saved complete stays so when the data has another length.

    Raises:
        ValueError: they have changed in the middle of a pass; the message names them with both values.
    """
    args = trainer.args
    found = {change.name: change for change in differences}
    changed = {name: found[name] for name in _ORDER if name in found}
    if args.train_sampling_strategy != "group_by_length":
        changed.pop("length_column_name", None)
    changed.pop("data_seed", None)
    seeds = [_data_seed(arguments) for arguments in (saved["arguments"], args.to_dict())]
    is_seeded = run.data.order_state().get("strategy", "sequential") != "sequential"  # iterable data has its own order
    if is_seeded and seeds[0] != seeds[1]:  # by whichever of the two it is given
        name = "data_seed" if "data_seed" in found else "seed"
        changed[name] = found[name]
    if args.ignore_data_skip:
        return dict.fromkeys(changed, "applied: the pass begins anew")
    if saved["is_between_passes"]:
        if SAMPLES in changed and run.position.samples:
            run.position.samples = run.data.num_samples or run.position.samples
        return dict.fromkeys(changed, "applied from the next pass on")
    if changed:
        raise ValueError(
            f"the checkpoint is {run.position.samples} samples into a pass over the data, whose order changes with "
            f"{'; '.join(map(str, changed.values()))}. Going on would repeat samples and leave others out: resume with "
            "the value of then, from a checkpoint between two passes, or with ignore_data_skip=True, which begins the "
            "pass anew"
        )
    return {}


def _data_seed(arguments: Mapping[str, Any]) -> Any:
    seed = arguments.get("data_seed")
    return arguments.get("seed") if seed is None else seed
