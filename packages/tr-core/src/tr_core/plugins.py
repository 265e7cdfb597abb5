"""Turn names in a configuration into the objects that installed packages offer under those names.

Nothing acts because it is installed: an entry point is imported only when its name was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tr_args.suggestion import did_you_mean

# Which of our packages brings a name, so that the error for a missing one can say what to install.
_BROUGHT_BY = {
    "tr.checkpointers": {"local": "tr-ckpt"},
    "tr.optimizers": dict.fromkeys(
        (
            "adafactor",
            "galore_adamw",
            "galore_adamw_layerwise",
            "galore_adamw_8bit",
            "galore_adamw_8bit_layerwise",
            "adamw_8bit",
            "galore_adafactor",
            "galore_adafactor_layerwise",
            "apollo_adamw",
            "apollo_adamw_layerwise",
            "apollo_mini",
            "apollo_mini_layerwise",
            "fira_adamw",
            "fira_adamw_layerwise",
            "lomo",
            "adalomo",
        ),
        "tr-optim",
    )
    | dict.fromkeys(("galore_torch_adamw", "galore_torch_adafactor"), "tr-optim[galore-torch]")
    | dict.fromkeys(("lomo_optim", "adalomo_optim"), "tr-optim[lomo-optim]")
    | dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"), "tr-optim[bitsandbytes]")
    | dict.fromkeys(("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"), "tr-optim[bitsandbytes]")
    | dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), "tr-optim[torchao]"),
    "tr.strategies": dict.fromkeys(("ddp", "fsdp", "mps"), "tr-dist")
    | {"deepspeed": "tr-dist[deepspeed]", "xla": "tr-dist[xla]"},
    "tr.callbacks": {
        "hub": "tr-ckpt[hub]",
        "tensorboard": "tr-log[tensorboard]",
        "wandb": "tr-log[wandb]",
        "mlflow": "tr-log[mlflow]",
        "csv": "tr-log",
        "neftune": "tr-optim",
        "jsonl": "tr-log",
    },
}
_KINDS = {
    "tr.callbacks": "callback",
    "tr.checkpointers": "checkpointer",
    "tr.commands": "command",
    "tr.optimizers": "optimizer",
    "tr.strategies": "strategy",
}


class PluginError(ValueError):
    """A configured name has no installed implementation, or more than one."""


@cache
def _entries(group: str) -> tuple[EntryPoint, ...]:
    # Cached: scanning the installed distributions costs milliseconds, and they do not change under a running process.
    return tuple(entry_points(group=group))


def available(group: str) -> dict[str, str]:
    """List the names installed in an entry-point group, each with its distribution and version.

    Nothing is imported.
    """
    return {entry.name: _origin(entry) for entry in _entries(group)}


def load(group: str, name: str, *, built_in: Iterable[str] = ()) -> Any:
    """Import the object that is installed under `name` in an entry-point group such as `tr.optimizers`.

    Args:
        group: the entry-point group.
        name: what was asked for.
        built_in: names that need no plugin, for the message: `name` may be one of them misspelt.

    Raises:
        PluginError: nothing, or more than one distribution, offers the name.
    """
    matches = [entry for entry in _entries(group) if entry.name == name]
    if not matches:
        raise PluginError(_missing(group, name, sorted(built_in)))
    if len({entry.value for entry in matches}) > 1:
        claims = " and ".join(f"{_origin(entry)} ({entry.value})" for entry in matches)
        raise PluginError(f"{_kind(group)} {name!r} is offered by {claims}; uninstall one of them")
    return matches[0].load()


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _kind(group: str) -> str:
    return _KINDS[group]


def _missing(group: str, name: str, built_in: list[str]) -> str:
    installed = ", ".join(f"{known} ({origin})" for known, origin in sorted(available(group).items())) or "none"
    message = f"no {_kind(group)} named {name!r}; installed: {installed}"
    if built_in:
        message += f"; built in: {', '.join(built_in)}"
    package = _brings(group, name)
    if package:
        return f"{message}; pip install '{package}' brings {name!r}"
    return message + did_you_mean(name, [*built_in, *available(group)])


def _brings(group: str, name: str) -> str | None:
    return _BROUGHT_BY.get(group, {}).get(name)
