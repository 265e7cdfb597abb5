"""Tell whether a run belongs on an XLA device, without loading torch_xla, which would take the device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_OFF = ("0", "false", "f", "no", "n", "off")
_GOOGLE = "0x1ae0"
# PCI numbers of TPUs: v2 and v3, two for tests, v4, v5e, v6e, v7x.
_TPUS = ("0x0027", "0x0056", "0x0062", "0x005e", "0x0063", "0x006f", "0x0076")
_DEVICES = Path("/sys/bus/pci/devices")


def belongs_on_xla(args: Any, environ: Mapping[str, str] | None = None, devices: Path = _DEVICES) -> bool:
    """Whether `strategy="auto"` is `xla`: `fsdp_config` says so, or torch_xla is there and a device for it.

    That torch_xla can be imported is not enough: PJRT_DEVICE names a device, or the machine has a TPU. Neither counts
    with `use_cpu` or USE_TORCH_XLA=0.

    Args:
        args: the training arguments.
        environ: variables; None takes this process's.
        devices: where the system lists its PCI devices.
    """
    if args.fsdp_config.get("xla"):
        return True
    environ = os.environ if environ is None else environ
    if args.use_cpu or environ.get("USE_TORCH_XLA", "").lower() in _OFF or find_spec("torch_xla") is None:
        return False
    return bool(environ.get("PJRT_DEVICE")) or has_tpu(devices)


def has_tpu(devices: Path = _DEVICES) -> bool:
    """Whether this machine has a TPU, by the numbers of its PCI devices."""
    for vendor in devices.glob("*/vendor"):
        if vendor.read_text().strip() == _GOOGLE and (vendor.parent / "device").read_text().strip() in _TPUS:
            return True
    return False
