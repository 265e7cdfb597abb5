"""Turn the state of a schedule that transformers saves into that of torch's, or tr-core's, of the same name."""

from __future__ import annotations

from typing import Any

from tr_ckpt.errors import DamagedCheckpointError

# What only the state of transformers' GreedyLR has.
_GREEDY = "reset_start_original"


def read(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the part `scheduler`. Of torch's own schedules it is what was saved."""
    state = {name: value for name, value in saved.items() if name != "verbose"}  # whether to print, before torch 2.7
    if _GREEDY not in state:
        return state
    try:
        return _greedy(state)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"the schedule's state lacks what it must hold: {error!r}") from error


def _greedy(state: dict[str, Any]) -> dict[str, Any]:
    limit, left = state.pop(_GREEDY), state.pop("reset_start")
    return {
        **{name: value for name, value in state.items() if name not in ("_init_lrs", "_streaming_avg")},
        "first_rates": state["_init_lrs"],
        "reset_start": limit,
        "rows_at_least": limit - left,
        "results": list(state.get("_streaming_avg", {}).get("values", [])),
    }
