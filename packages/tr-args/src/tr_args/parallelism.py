"""Read over how many processes samples and shards are spread: the argument `parallelism_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tr_args.constraints import Constraint
from tr_args.errors import RefusedError
from tr_args.suggestion import did_you_mean

DATA_SIZES = ("dp_replicate_size", "dp_shard_size")
# What divides the work on one sample, which nothing here does. size -> what goes by it
_WITHIN_SAMPLES = {"tp_size": "matrices", "cp_size": "sequences", "sp_size": "sequences"}
SIZES = (*DATA_SIZES, *_WITHIN_SAMPLES)
# How those are divided: without effect where they are not.
_OF_THOSE = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")
_KEYS = (*SIZES, *_OF_THOSE)


class ParallelSizes(Constraint):
    """A mapping of sizes, or an object that has them as attributes, as Accelerate's `ParallelismConfig` does."""

    def before(self, value: Any) -> Any:
        """Return a mapping of what an object has."""
        if all(hasattr(value, name) for name in DATA_SIZES):
            return {name: found for name in _KEYS if (found := getattr(value, name, None)) is not None}
        return value

    def after(self, value: Any) -> Any:
        """Return the sizes that are about data, under their plain names."""
        return read_sizes(value)


def read_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return `dp_replicate_size` and `dp_shard_size`, as far as they are given; names may have Accelerate's prefix.

    Raises:
        RefusedError: (a ValueError) a key is not known, a size is not a whole number from 1, or it divides the work on
            one sample.
    """
    sizes: dict[str, int] = {}
    for given, size in config.items():
        name = given.removeprefix("parallelism_config_")
        if name not in _KEYS:
            raise RefusedError(f"has the unknown key {given}{did_you_mean(name, _KEYS)}")
        if size is None or name in _OF_THOSE:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise RefusedError(f"at {given}={size!r}: needs a number of processes, from 1")
        if name in DATA_SIZES:
            sizes[name] = size
        elif size > 1:
            raise RefusedError(
                f"at {given}={size}: {_WITHIN_SAMPLES[name]} are not divided over processes; leave it out, and divide "
                "the model by dp_shard_size with fsdp='full_shard auto_wrap'"
            )
    return sizes
