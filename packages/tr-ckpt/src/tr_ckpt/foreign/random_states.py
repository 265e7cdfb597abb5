"""Turn the random states that transformers saves into those of the part `rng`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import reads
from tr_ckpt.errors import DamagedCheckpointError
from tr_ckpt.foreign import archive

# Kinds of devices whose generators are restored here; of others that transformers knows nothing is taken over.
_DEVICES = ("cuda", "xpu", "mps")


def find(folder: Path) -> dict[int, str]:
    """Return the names of the files with random states, by rank."""
    if reads.is_file(folder / "rng_state.pth"):
        return {0: "rng_state.pth"}
    matches = (re.fullmatch(r"rng_state_(0|[1-9][0-9]{0,5})\.pth", name) for name in reads.names_in(folder))
    return dict(sorted((int(match[1]), match[0]) for match in matches if match))


def read(path: Path) -> dict[str, Any]:
    """Return the random states of one rank: of Python, NumPy, torch on the host and, as a list, on its devices.

    The numbers of NumPy's generator are there under the names of `RNGState` and those of tr-core.

    Raises:
        CheckpointError: the file holds anything but plain state.
        DamagedCheckpointError: it is damaged.
    """
    saved = archive.read(path)
    try:
        version, words, gauss = saved["python"]
        words = torch.tensor(words, dtype=torch.int64)
        if words.ndim != 1:
            raise ValueError(f"words of shape {tuple(words.shape)}")
        state: dict[str, Any] = {
            "python": {"version": version, "words": words, "gauss": gauss},
            "torch": saved["cpu"],
        }
        if "numpy" in saved:
            name, keys, position, has_gauss, cached = saved["numpy"]
            words = {"keys": keys.to(torch.int64), "position": int(position), "has_gauss": int(has_gauss)}
            state["numpy"] = {"algorithm": name, "name": name, **words, "gauss": float(cached), "cached": float(cached)}
        for kind in _DEVICES:
            if kind in saved:
                held = saved[kind]
                state[kind] = list(held) if isinstance(held, list | tuple) else [held]
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise DamagedCheckpointError(f"{path.name} lacks what it must hold: {error!r}") from error
    return state
