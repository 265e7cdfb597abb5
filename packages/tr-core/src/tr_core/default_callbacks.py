"""Choose the callbacks that every run has: flow, progress, metrics on disk, and the trackers that were asked for."""

from __future__ import annotations

from typing import Any

from tr_core import plugins
from tr_core.callbacks.flow import DefaultFlowCallback
from tr_log import MetricsFile, PrinterCallback, ProgressCallback, get_logger

logger = get_logger(__name__)

# Callbacks that have an option of their own: `report_to="all"` does not mean them.
NOT_TRACKERS = ("hub", "neftune")


def default_callbacks(args: Any) -> list[Any]:
    """Return the callbacks that the arguments ask for, in the order they are called.

    Read are `disable_tqdm`, `report_to`, `neftune_noise_alpha` and `push_to_hub`.

    Raises:
        tr_core.plugins.PluginError: a tracker in `report_to` is not installed.
    """
    named = trackers(args)
    noise = [plugins.load("tr.callbacks", "neftune")(args)] if args.neftune_noise_alpha else []
    hub = [plugins.load("tr.callbacks", "hub")(args)] if args.push_to_hub else []
    display = PrinterCallback() if args.disable_tqdm else ProgressCallback()
    return [DefaultFlowCallback(), *noise, MetricsFile(), *named, display, *hub]


def trackers(args: Any) -> list[Any]:
    """Return the trackers that `report_to` asks for: `none` is none of them, `all` every one that can be used.

    Raises:
        tr_core.plugins.PluginError: a named one is not installed.
        ImportError: the library of a named one is not.
    """
    if "all" not in args.report_to:
        return [plugins.load("tr.callbacks", name)(args) for name in args.report_to if name != "none"]
    usable = []
    for name in sorted(plugins.available("tr.callbacks")):
        if name in NOT_TRACKERS:
            continue
        try:
            usable.append(plugins.load("tr.callbacks", name)(args))
        except ImportError as error:
            logger.info("report_to='all' leaves out %s: %s", name, error)
    return usable
