"""Kill a run of each optimizer at every place, in steps that find a basis too, and compare its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from crash_kills import kills_at_places, kills_before_operations
from crash_ranks import WORLD_SIZE, kills_of_ranks
from crash_session import Session
from crash_training import NEW_BASIS
from optimizer_settings import SETTINGS, Setting
from runner import Case

IN_SAVES = 10  # one of so many operations of a save is one that a kill precedes
PLACES_OF_RANKS = 3  # one of so many places is one where a rank is killed


def arguments(setting: Setting, world_size: int = 1) -> dict[str, Any]:
    """Return the training arguments of a setting, with accumulation where that is possible; a step has four samples."""
    micro_batches = 2 if setting.accumulates else 1
    return {
        **setting.arguments,
        "gradient_accumulation_steps": micro_batches,
        "per_device_train_batch_size": 4 // world_size // micro_batches,
    }


def each_optimizer(session: Session) -> Iterator[Case]:
    """Yield kills at every place of a run of each optimizer, and before operations of its saves."""
    for number, setting in enumerate(SETTINGS):
        own = _session_of(session, setting)
        problems = own.prepare()
        if setting.keeps_bases:
            problems += _bases(own)
        if problems:
            yield Case(f"{setting}, left alone", lambda folder, problems=problems: "; ".join(problems))
        in_saves = list(kills_before_operations(own, "kill"))[number % IN_SAVES :: IN_SAVES]
        for fault in [*kills_at_places(own), *in_saves]:
            yield replace(fault, label=f"{setting}, {fault.label}")


def each_optimizer_on_ranks(session: Session) -> Iterator[Case]:
    """Yield kills of two ranks together, for the optimizers that consume gradients while they are computed."""
    for setting in SETTINGS:
        if setting.in_backward:
            own = _session_of(session, setting, WORLD_SIZE)
            for fault in kills_of_ranks(own, PLACES_OF_RANKS):
                yield replace(fault, label=f"{setting}, {fault.label}")


def _session_of(session: Session, setting: Setting, world_size: int = 1) -> Session:
    # As deep as the other session, in whose folder its cases happen: what is synced above a run counts as operations.
    root = session.root.with_name(f"{session.root.name} {setting} on {world_size}".replace(" ", "-"))
    root.mkdir()
    return Session(root, session.quick, arguments(setting, world_size))


def _bases(session: Session) -> list[str]:
    """Say where a run that projects finds bases in so few steps that no kill is between two of them."""
    between_saves = {saved for place, saved in session.alone[False].places if place == NEW_BASIS}
    return [] if len(between_saves) >= 3 else [f"bases are found only after the saves of steps {between_saves}"]
