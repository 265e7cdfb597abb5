"""Restore a model whether a checkpoint holds it whole or as an adapter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tr_core.adapters import ADAPTER, UNFROZEN
from tr_core.model_state import model_part
from tr_core.protocols import Stateful

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


def restore_either_form(
    trainer: Trainer, parts: Mapping[str, Stateful], source: str | Path | None, optional: Collection[str] = ()
) -> int | None:
    """Restore `parts` as the checkpointer does; a model with an adapter also from a checkpoint that holds it whole.

    Such are of versions that knew no other form.

    Raises:
        ValueError: as the checkpointer raises, and where weights are trained that the checkpoint does not hold.
    """
    checkpointer = trainer.checkpointer()
    if ADAPTER not in parts:
        return checkpointer.restore(parts, source=source, optional=optional)
    either = {*optional, ADAPTER, UNFROZEN, "model"}
    with _watched(model_part(trainer)) as (whole, loaded):
        step = checkpointer.restore({**parts, "model": whole}, source=source, optional=either)
    adapter, unfrozen = (getattr(parts[name], "is_loaded", False) for name in (ADAPTER, UNFROZEN))
    is_whole = len(loaded) > adapter + unfrozen  # these two load into the same module
    if step is None or is_whole or (adapter and (unfrozen or not parts[UNFROZEN].state_dict())):
        return step
    missing = "weights that are trained beside the adapter" if adapter else "adapter"
    raise ValueError(
        f"the checkpoint of step {step} holds no {missing}; resume with the model that it was saved with, or begin a "
        "new run"
    )


@contextmanager
def _watched(part: Stateful) -> Iterator[tuple[Stateful, list[bool]]]:
    """Give a part, and a list that gets an entry each time a state is loaded into it."""
    loaded: list[bool] = []
    if not isinstance(part, nn.Module):
        yield Watched(part, loaded), loaded
        return
    hook = part.register_load_state_dict_post_hook(lambda module, keys: loaded.append(True))
    try:
        yield part, loaded
    finally:
        hook.remove()


class Watched:
    """A part that notes when a state is loaded into it.

    Args:
        part: what is saved and restored.
        loaded: gets an entry each time.
    """

    def __init__(self, part: Stateful, loaded: list[bool]) -> None:
        self._part, self._loaded = part, loaded

    def state_dict(self) -> dict[str, Any]:
        """Return the part's state."""
        return self._part.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a state into the part, and note it."""
        self._part.load_state_dict(state_dict)
        self._loaded.append(True)
