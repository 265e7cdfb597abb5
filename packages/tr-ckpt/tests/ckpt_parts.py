"""Parts to save: small, and told apart by a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tr_ckpt.lock_file import NAME


class Values:
    """A state made from one number, so that a mix of two saves cannot go unnoticed."""

    def __init__(self, number: int = 0) -> None:
        self.state: dict[str, Any] = {
            "number": number,
            "tensor": torch.full((7,), float(number)),
            "pair": (number, "x"),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict

    @property
    def number(self) -> int:
        number = self.state["number"]
        assert torch.equal(self.state["tensor"], torch.full((7,), float(number)))
        assert self.state["pair"] == (number, "x")
        return number


def parts(number: int = 0) -> dict[str, Values]:
    return {"model": Values(number), "extra": Values(number)}


def number_of(restored: dict[str, Values]) -> int:
    [number] = {part.number for part in restored.values()}
    return number


def listed(folder: Path) -> list[str]:
    """Return what is in a folder, sorted, but for its lock, which stays as long as something saves there."""
    return sorted(path.name for path in folder.iterdir() if path.name != NAME)
