"""Look whether the device computes in the precision that is asked for, and whether the launch fits."""

from __future__ import annotations

from collections.abc import Iterator

from tr_core.plugins import PluginError
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject
from tr_core.single_device import SingleDevice
from tr_core.strategies import choose_strategy

_OPTIONS = ("strategy", "fp16", "bf16", "use_cpu")


def check_device(subject: Subject) -> Iterator[Problem]:
    """Find a precision that the device has not, and a launch environment that does not fit the strategy.

    A strategy of several processes is not built: that would join them. Its precision is checked as that of one device.
    """
    args = subject.args
    try:
        if args.strategy in ("single", "mps") or (args.strategy == "auto" and args.world_size == 1):
            choose_strategy(args)
        else:
            SingleDevice.from_arguments(args)
    except PluginError:
        return  # reported with the names
    except ValueError as error:
        given = [subject.origin(name) for name in _OPTIONS]
        origins = [origin for origin in given if origin not in ("default", "")]
        yield Problem("T303", str(error), ", ".join(origins))
