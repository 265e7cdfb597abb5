"""Find the trackers that `report_to` names, and build them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tr_args import TrainingArguments
from tr_core import plugins
from tr_log import get_logger

logger = get_logger(__name__)

_TRACKERS, _CALLBACKS = "tr.trackers", "tr.callbacks"
# Callbacks that arguments of their own ask for: no trackers, though they share the group of callbacks.
CALLBACKS_BY_ARGUMENT = {"neftune": "neftune_noise_alpha", "hub": "push_to_hub"}


def trackers(args: TrainingArguments) -> list[Any]:
    """Return the trackers in `report_to`: `none` means no tracker, `all` every usable one.

    Raises:
        tr_core.plugins.PluginError: a named one is not installed.
        ImportError: the library of a named one is not installed.
    """
    if "all" not in args.report_to:
        return [tracker_factory(name)(args) for name in args.report_to if name != "none"]
    usable = []
    for name in sorted({*plugins.available(_TRACKERS), *_among_callbacks()}):
        factory = tracker_factory(name)
        if getattr(factory, "by_name_only", False):
            continue
        try:
            usable.append(factory(args))
        except ImportError as error:
            logger.info("report_to='all' leaves out %s: %s", name, error)
    return usable


def tracker_factory(name: str) -> Callable[[TrainingArguments], Any]:
    """Return the function of the arguments that builds the tracker with a name in `report_to`.

    Raises:
        tr_core.plugins.PluginError: it is not installed.
    """
    try:
        return plugins.load(_CALLBACKS if name in _among_callbacks() else _TRACKERS, name)
    except plugins.PluginError as error:
        raise plugins.PluginError(f"report_to={name!r}: {error}") from None


def _among_callbacks() -> set[str]:
    """Return the trackers that packages offer in the group of all callbacks, where trackers were at first."""
    return {*plugins.available(_CALLBACKS)}.difference(CALLBACKS_BY_ARGUMENT, plugins.available(_TRACKERS))
