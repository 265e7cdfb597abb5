"""Save and restore the state of every random number generator of this process."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Kinds of devices with generators of their own, besides the CPU.
_DEVICES = ("cuda", "xpu", "mps")


class RNGState:
    """The random generators of Python, NumPy, torch and the devices in use, as one part of a checkpoint.

    NumPy is included if it was imported, a device once torch has initialised it; this class does neither.
    The state consists of tensors and plain values, under the keys that tr-core's Trainer uses: each restores what
    the other saved. Give it to a `Checkpointer` as the part named `rng`: each rank then saves its own.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators. Reads device generators without waiting for kernels."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            algorithm, keys, position, has_gauss, gauss = numpy.random.get_state()
            state["numpy"] = {
                "algorithm": str(algorithm),
                "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            }
        for kind in _DEVICES:
            if _in_use(kind):
                state[kind] = _device_states(kind)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators to a state that `state_dict` returned.

        A device's generator that was not saved, or that this process lacks, stays unchanged; a warning names
        it.
        """
        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state_dict["torch"])
        if "numpy" in state_dict:
            _set_numpy(state_dict["numpy"])
        for kind in _DEVICES:
            self._set_devices(kind, state_dict.get(kind, []))

    def _set_devices(self, kind: str, saved: list[torch.Tensor]) -> None:
        module = getattr(torch, kind)
        present = _count(kind)
        for index in range(min(len(saved), present)):
            if kind == "mps" or len(saved) == 1:  # of the device in use, as the Trainer saves it
                module.set_rng_state(saved[index])
            else:
                module.set_rng_state(saved[index], index)
        if len(saved) > present:
            logger.warning(
                "%d of %d saved %s random states are not restored: this process sees %d such devices",
                len(saved) - present, len(saved), kind, present,
            )  # fmt: skip
        elif _in_use(kind) and len(saved) < present:
            logger.warning(
                "%d %s random states stay unchanged: the checkpoint holds %d",
                present - len(saved),
                kind,
                len(saved),
            )


def _set_numpy(saved: dict[str, Any]) -> None:
    import numpy

    keys = numpy.array(saved["keys"].tolist(), dtype=numpy.uint32)
    numpy.random.set_state((saved["algorithm"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))


def _count(kind: str) -> int:
    return getattr(torch, kind).device_count() if getattr(torch, kind).is_available() else 0


def _in_use(kind: str) -> bool:
    if kind == "mps":  # has no initialisation, and reading it costs nothing
        return torch.backends.mps.is_available()
    return getattr(torch, kind).is_available() and getattr(torch, kind).is_initialized()


def _device_states(kind: str) -> list[torch.Tensor]:
    if kind == "mps":
        return [torch.mps.get_rng_state()]
    return getattr(torch, kind).get_rng_state_all()
