"""Hand callbacks the states that a checkpoint holds of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tr_core.protocols import EvaluationWeights

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


class CallbackStates:
    """The states of a Trainer's callbacks, as a part to be restored; what does not fit is named in a warning.

    With `restore_callback_states_from_checkpoint=False` callbacks begin anew, but for those that hold weights.

    Args:
        trainer: whose callbacks they are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the states by the callbacks' names."""
        return self._trainer.callback_handler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Hand each callback its own state, and name those that have none and states that nobody takes."""
        trainer, wanted = self._trainer, self._trainer.callback_handler.stateful()
        if not trainer.args.restore_callback_states_from_checkpoint:
            anew = sorted(name for name, callback in wanted.items() if not isinstance(callback, EvaluationWeights))
            if anew:
                trainer.logger.info("restore_callback_states_from_checkpoint=False: %s begin anew", ", ".join(anew))
            state_dict = {name: state for name, state in state_dict.items() if name not in anew}
            wanted = {name: callback for name, callback in wanted.items() if name not in anew}
        if nobody := sorted(set(state_dict) - set(trainer.callback_handler.stateful())):
            trainer.logger.warning(
                "the checkpoint holds states of callbacks that this run does not have, and which are passed over: %s",
                ", ".join(nobody),
            )
        if missing := sorted(set(wanted) - set(state_dict)):
            trainer.logger.warning(
                "the checkpoint holds no state of these callbacks, which begin anew: %s", ", ".join(missing)
            )
        trainer.callback_handler.load_state_dict(state_dict)
