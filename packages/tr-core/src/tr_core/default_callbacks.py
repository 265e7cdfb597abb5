"""Choose the callbacks that every run has: flow, progress, metrics on disk, and the trackers that were asked for."""

from __future__ import annotations

from typing import Any

from tr_core import plugins
from tr_core.callbacks.flow import DefaultFlowCallback
from tr_log import MetricsFile, PrinterCallback, ProgressCallback


# Callbacks that have an option of their own: `report_to="all"` does not mean them.
NOT_TRACKERS = ("hub", "neftune")


def default_callbacks(args: Any) -> list[Any]:
    """Return the callbacks for `disable_tqdm`, `report_to`, `neftune_noise_alpha` and `push_to_hub`, in the order they are called.

    Raises:
        tr_core.plugins.PluginError: a tracker in `report_to` is not installed.
    """
    named = [plugins.load("tr.callbacks", name)(args) for name in tracker_names(args.report_to)]
    noise = [plugins.load("tr.callbacks", "neftune")(args)] if args.neftune_noise_alpha else []
    hub = [plugins.load("tr.callbacks", "hub")(args)] if args.push_to_hub else []
    display = PrinterCallback() if args.disable_tqdm else ProgressCallback()
    return [DefaultFlowCallback(), *noise, MetricsFile(), *named, display, *hub]


def tracker_names(report_to: list[str]) -> list[str]:
    """Return the trackers asked for: `none` is none of them, `all` every one that is installed."""
    if report_to in ([], ["none"]):
        return []
    if "all" in report_to:
        return [name for name in plugins.available("tr.callbacks") if name not in NOT_TRACKERS]
    return list(report_to)
