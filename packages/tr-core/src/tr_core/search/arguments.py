"""Set training arguments for a trial, and put them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tr_args.aliases import aliases
from tr_args.construction import unknown
from tr_args.errors import ArgumentsError
from tr_args.schema import schema

# Read when a Trainer is built, or set by the search itself: a trial that sets them would change nothing.
_FIXED = (
    "accelerator_config",
    "bf16",
    "ddp_",
    "deepspeed",
    "disable_tqdm",
    "ema_",
    "enable_jit_checkpoint",
    "fast_dev_run",
    "fp16",
    "fsdp",
    "hub_",
    "local_rank",
    "log_level",
    "log_on_each_node",
    "max_time",
    "neftune_",
    "output_dir",
    "parallelism_config",
    "push_to_hub",
    "report_to",
    "resume_from_checkpoint",
    "skip_memory_metrics",
    "strategy",
    "torch_compile",
    "torch_empty_cache_steps",
    "use_cpu",
)


@contextmanager
def changed(args: Any, values: Mapping[str, Any], output_dir: str) -> Iterator[None]:
    """Change arguments inside a block and put all of them back afterwards, whatever was changed in it.

    Args:
        args: the arguments; they stay the same object.
        values: new values by name.
        output_dir: where this trial writes.
    """
    before = dict(vars(args))
    try:
        for name, value in values.items():
            setattr(args, name, value)
        args.output_dir = output_dir
        args.check()
        yield
    finally:
        vars(args).clear()
        vars(args).update(before)


def converted(args: Any, values: Any) -> dict[str, Any]:
    """Return what a search space gave, with the types of the arguments of these names; `args` stay as they are.

    Raises:
        ValueError: a name is no argument, or one that a trial cannot set, or a value does not fit; says all of it.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"hp_space returned {values!r}; it must return a dict of training arguments, such as "
            '{"learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True)}'
        )
    kind = type(args)
    known = {*schema(kind), *aliases(kind)}
    problems = [unknown(kind, name) for name in values if name not in known]
    problems += [
        f"{name} is fixed when the Trainer is built and cannot be searched"
        for name in values
        if name in known and name not in ("fp16_full_eval", "bf16_full_eval") and name.startswith(_FIXED)
    ]
    if problems:
        raise ValueError(f"hp_space: {'; '.join(problems)}")
    before = dict(vars(args))
    try:
        for name, value in values.items():
            setattr(args, name, value)
        return {name: getattr(args, name) for name in values}
    except ArgumentsError as error:
        raise ValueError(f"hp_space: {error}") from None
    finally:
        vars(args).clear()
        vars(args).update(before)
