"""Begin runs with the reference, and go on with them."""

from pathlib import Path
from typing import Any

from parity_harness import OURS, REFERENCE, Outcome, Scenario, Side, assert_same, run

SAVING = {"save_strategy": "steps", "save_steps": 1}


def begun(scenario: Scenario, folder: Path) -> Outcome:
    """Train with the reference, which saves every step."""
    again = Scenario(**{**vars(scenario), "arguments": {**SAVING, **scenario.arguments}})
    return run(REFERENCE, again, folder / "begun")


def resumed(side: Side, scenario: Scenario, folder: Path, step: int, **changes: Any) -> Outcome:
    """Go on from the reference's checkpoint of `step`, in another folder, and save nothing."""
    arguments = {**SAVING, **scenario.arguments, "save_strategy": "no", **changes}
    again = Scenario(**{**vars(scenario), "arguments": arguments})
    checkpoint = folder / "begun" / f"checkpoint-{step}"
    return run(side, again, folder / f"{side.name}-{step}", resume_from_checkpoint=str(checkpoint))


def both_go_on(scenario: Scenario, folder: Path, steps: tuple[int, ...]) -> tuple[Outcome, ...]:
    """Compare how both go on from some steps, everything bit for bit; return the last two runs."""
    begun(scenario, folder)
    outcomes: tuple[Outcome, ...] = ()
    for step in steps:
        outcomes = tuple(resumed(side, scenario, folder, step) for side in (REFERENCE, OURS))
        assert_same(*outcomes)
        assert outcomes[1].output.global_step == 10
    return outcomes
