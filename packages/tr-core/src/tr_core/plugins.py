"""Load the objects that installed packages register under the names in a configuration.

An installed package does nothing by itself: an entry point is imported only if its name is requested.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tr_args.errors import did_you_mean

# Packages that register names of a group, for the error about a missing name.
_PACKAGES = {
    "tr.callbacks": ("tr-ckpt", "tr-optim"),
    "tr.checkpointers": ("tr-ckpt",),
    "tr.optimizers": ("tr-optim",),
    "tr.strategies": ("tr-dist",),
    "tr.trackers": ("tr-log",),
}
_KINDS = {
    "tr.callbacks": "callback",
    "tr.checkpointers": "checkpointer",
    "tr.commands": "command",
    "tr.optimizers": "optimizer",
    "tr.strategies": "strategy",
    "tr.trackers": "tracker",
}
# Names that are known and offered here by nothing, and what to do instead.
_INSTEAD = {
    ("tr.optimizers", "adamw_anyprecision"): "any more: torchdistX, whose it is, does not install with today's torch; "
    "use optim='stable_adamw' with optim_args='kahan_sum=true' (pip install 'tr-optim[torch-optimi]') for weights of "
    "low precision that lose no small update, optim='adamw_8bit' for small moments, or optim='adamw_torch'",
    (
        "tr.optimizers",
        "adamw_torch_npu_fused",
    ): "here: it runs on Ascend NPUs only, for which there is no strategy; "
    "use optim='adamw_torch', or build torch_npu's NpuFusedAdamW yourself and pass optimizers=(it, None)",
    ("tr.optimizers", "adamw_torch_xla"): "here: torch_xla's AdamW differs from torch's only in that it skips steps of "
    "overflown float16 gradients by itself, and here on_nonfinite does that; use optim='adamw_torch', which trains on "
    "XLA devices",
    ("tr.optimizers", "galore_torch_adamw_8bit"): "here: galore-torch's GaLoreAdamW8bit calls bitsandbytes by a "
    "signature that it no longer has, after which projected weights of less than 4096 numbers and biases never change, "
    "and nothing says so; and it needs a GPU. Use optim='galore_adamw_8bit', this project's own",
    ("tr.trackers", "csv"): "any more: every run leaves metrics.jsonl with the same entries, of which "
    "`pandas.read_json('metrics.jsonl', lines=True).to_csv('metrics.csv')` makes a table",
}


class PluginError(ValueError):
    """Report a configured name with no installed implementation, or with more than one."""


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

    Raises:
        PluginError: no installed distribution registers the name, or more than one does, or the module that it names
            lacks the object.
    """
    matches = [entry for entry in _entries(group) if entry.name == name]
    if not matches:
        raise PluginError(_missing(group, name, sorted(built_in)))
    if len({entry.value for entry in matches}) > 1:
        claims = " and ".join(f"{_origin(entry)} ({entry.value})" for entry in matches)
        raise PluginError(f"{_kind(group)} {name!r} is offered by {claims}; uninstall one of them")
    entry = matches[0]
    try:
        return entry.load()
    except AttributeError as error:
        raise PluginError(f"{_kind(group)} {name!r} is {entry.value} of {_origin(entry)}, and {error}") from error


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _kind(group: str) -> str:
    return _KINDS[group]


def _missing(group: str, name: str, built_in: list[str]) -> str:
    if instead := _INSTEAD.get((group, name)):
        return f"there is no {_kind(group)} {name!r} {instead}"
    known = sorted({*built_in, *available(group)})
    suggestion = did_you_mean(name, known)
    message = f"no {_kind(group)} named {name!r}{suggestion or ';'} installed: {', '.join(known) or 'none'}"
    distributions = {entry.dist.name for entry in _entries(group) if entry.dist is not None}
    missing = [package for package in _PACKAGES.get(group, ()) if package not in distributions]
    if missing:
        return f"{message}; more come with pip install {' '.join(missing)}"
    return message + ("" if suggestion else "; a package's new entry points are found after it is installed again")
