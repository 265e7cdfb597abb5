"""Save and stop at a step boundary, on all ranks at the same step.

A signal or a failed background save triggers it. All ranks also log, evaluate, save and stop together if the callbacks
of only one rank request it.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any, NoReturn

import torch

from tr_args import TrainingArguments
from tr_core.data.loaders import SeededLoader
from tr_core.data.position import DataPosition
from tr_core.preemption.signals import StopSignals, interrupted, saves_on_signal
from tr_core.protocols import Collectives
from tr_core.random_state import RandomState
from tr_core.state import TrainerControl, TrainerState
from tr_core.trainer_methods import TrainerMethods
from tr_log import get_logger
from tr_log.phases import EXCHANGE, phase
from tr_log.terminal import write_at_once

logger = get_logger("tr_core.trainer")

# What ranks exchange: 0, a signal's number, or this constant, which is larger than any signal's number.
FAILED_SAVE = 1000


class Preemption:
    """Ends a run between two steps after a signal or a failed checkpoint.

    The first signal is handled when a step ends, after all callbacks. The step is logged if due, then saved, and
    `Interrupted` is raised. An evaluation that is due or running is skipped; the checkpoint records it, and the resumed
    run begins with it. A signal at the last step has no effect, unless it comes during an evaluation.

    With one process, nothing here is called before a signal, except with background checkpoints: then each step checks
    whether the save failed. With several ranks, one exchange on the host a step overlaps with the next step, on one
    machine without a collective. So all ranks stop at the step after the one in which the signal was seen. The same
    exchange carries the callback flags (`FlagSync`).
    """

    def __init__(
        self,
        owner: TrainerMethods,
        strategy: Collectives,
        position: DataPosition,
        save: Callable[[], None],
        writes: Callable[[], bool],
    ) -> None:
        self._owner, self._strategy, self._position, self._save, self._writes = owner, strategy, position, save, writes
        self._listeners: dict[str, Callable[..., None]] = {"on_step_end": self._after_step, "on_save": self._after_save}
        self._cuts_evaluations = owner.args.save_async or saves_on_signal(owner.args)
        if self._cuts_evaluations:
            self._listeners["on_prediction_step"] = self._after_prediction_step
        self._agreement = FlagSync(strategy) if strategy.world_size > 1 else None
        if self._agreement is not None:
            self._listeners |= dict.fromkeys(("on_train_begin", "on_epoch_end"), self._after_other)
        self.signals = StopSignals(self._note)
        self._agreed, self._is_leaving = 0, False
        self._error: Exception | None = None
        self._before_evaluation: _StateBeforeEvaluation | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Stop training inside the block with a checkpoint after a signal, or with the error of a failed save.

        Without checkpoints signals keep their usual effect; a callback may still request a checkpoint.
        """
        args = self._owner.args
        if args.save_async or self._agreement is not None:  # a save or another rank may end the run at any step
            self.listen()
        try:
            with self.signals if saves_on_signal(args) else nullcontext():
                yield
        finally:
            for event, method in self._listeners.items():
                self._owner.callback_handler.unlisten(event, method)

    def listen(self) -> None:
        """Start to check at every step, evaluation batch and save; a signal handler calls this."""
        for event, method in self._listeners.items():
            self._owner.callback_handler.listen(event, method)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let a signal cut the evaluation inside the block short; the state from before it is restored first."""
        if not self._cuts_evaluations:
            yield
            self.agree_on_flags()
            return
        self._before_evaluation = before = _StateBeforeEvaluation(self._owner, self._strategy.device)
        try:
            yield
            self.agree_on_flags()
        except _EvaluationInterrupted:
            before.restore()
            self._skip_evaluation(saves=self._owner.control.should_save)
            self._is_leaving = True
            self._save()
        finally:
            self._before_evaluation = None

    def agree_on_flags(self) -> None:
        """Merge the callback flags of all ranks. Collective."""
        if self._agreement is not None:
            with phase(EXCHANGE):
                self._is_asked(self._owner.control, waits=True)

    def wait(self) -> None:
        """Wait after the last step for checkpoints that are being written. Every rank calls it."""
        if self._agreement is not None:
            self._take(self._agreement.last_number())
        if self._writes():
            self._owner.checkpointer().wait()
        if number := self._agreed or self.signals.number:
            logger.info(
                "%s came with the run's last step: it is complete, and ends as if there had been none",
                signal.Signals(number).name,
            )

    def wait_after(self, error: BaseException) -> None:
        """Wait after an exception for this rank's checkpoint writes; a failure of them becomes a note of `error`.

        No collective: other ranks may have ended or be at another point.
        """
        if not self._writes():
            return
        checkpointer = self._owner.checkpointer()
        try:
            checkpointer.path(self._owner.state.global_step)  # this waits
            checkpointer.check()
        except Exception as failure:
            error.add_note(f"besides, in the background: {type(failure).__name__}: {failure}")

    def _note(self) -> None:
        # No log line in a signal handler: the interrupted code may hold the log's lock.
        self.listen()
        if self._strategy.rank == 0:
            text = f"{signal.Signals(self.signals.number).name}: saving and stopping when this step is done"
            write_at_once(f"{text}; a second one stops at once")

    def _after_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The epoch ends here anyway; stop at the next step.
        if not self._is_asked(control) or control.should_training_stop or control.should_epoch_stop:
            return
        if control.should_evaluate:
            self._skip_evaluation(saves=control.should_save)
        control.should_evaluate, control.should_save = False, True
        self._is_leaving = True

    def _after_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._before_evaluation is None:  # an evaluation that a callback started is not interrupted
            return
        # A user's loader may give ranks different numbers of batches, so exchanges here would not match.
        if self._strategy.world_size > 1 and not isinstance(kwargs["eval_dataloader"], SeededLoader):
            return
        if self._is_asked(None):
            raise _EvaluationInterrupted

    def _after_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_leaving:
            self._leave(args, state)
        is_asked = self._is_asked(control, waits=True)
        if is_asked and not (control.should_training_stop or control.should_epoch_stop):
            self._leave(args, state)

    def _after_other(self, *given: object, **named: object) -> None:
        self.agree_on_flags()

    def _leave(self, args: TrainingArguments, state: TrainerState) -> NoReturn:
        owner = self._owner
        if args.save_async:
            owner.checkpointer().wait()
        error = interrupted(self._agreed, state.global_step, owner.checkpointer().path(state.global_step))
        logger.warning(
            "%s: stopping with exit code %d at step %d of %d, saved as %s; %s",
            error.signal.name,
            error.code,
            state.global_step,
            state.max_steps,
            error.checkpoint,
            _how_to_resume(args, is_trial=owner.search is not None),
        )
        raise error

    def _skip_evaluation(self, *, saves: bool) -> None:
        self._position.pending = ["evaluate", *(["save"] if saves else [])]

    def _is_asked(self, control: TrainerControl | None, *, waits: bool = False) -> bool:
        """Whether all ranks know of a signal. Every rank calls it equally often.

        Raises:
            Exception: a checkpoint could not be written in the background.
        """
        mine = self._find()
        if self._agreement is None:
            self._take(mine)
        elif control is None:
            self._take(self._agreement.on_number(mine))
        else:
            self._take(self._agreement.on_flags(control, mine, waits=waits))
        return self._agreed > 0

    def _find(self) -> int:
        if self._error is None and self._writes():
            try:
                self._owner.checkpointer().check()
            except Exception as error:  # all ranks raise together, after the exchange
                self._error = error
        return self.signals.number if self._error is None else FAILED_SAVE

    def _take(self, value: int) -> None:
        if value == FAILED_SAVE:
            raise (
                self._error
                if self._error is not None
                else RuntimeError(
                    "a checkpoint could not be written in the background by another rank, whose own error says why; "
                    "training ends on all of them"
                )
            )
        self._agreed = value


class _EvaluationInterrupted(BaseException):  # not an Exception: no handler may treat it as a failure
    """Ends an evaluation that the resumed run repeats."""


class _StateBeforeEvaluation:
    """The parts of a run's state that an evaluation changes, as they were before it."""

    def __init__(self, owner: TrainerMethods, device: torch.device) -> None:
        self._owner, self._device = owner, device
        self._generators = RandomState(device).state_dict()
        self._callbacks = copy.deepcopy(owner.callback_handler.state_dict())
        self._num_entries = len(owner.state.log_history)

    def restore(self) -> None:
        RandomState(self._device).load_state_dict(self._generators)
        self._owner.callback_handler.load_state_dict(self._callbacks)
        del self._owner.state.log_history[self._num_entries :]


def _how_to_resume(args: TrainingArguments, *, is_trial: bool) -> str:
    if args.save_only_model:
        return "save_only_model=True, so the checkpoint holds the weights, but no run can go on from it"
    if is_trial:
        return "hyperparameter_search(resume=True) with the same arguments goes on from there"
    return "train(resume_from_checkpoint=True) with the same arguments goes on from there"


FLAGS = tuple(flag.name for flag in fields(TrainerControl))


class FlagSync:
    """Exchanges a number and the callback flags between ranks, once a step.

    A rank without flags does not block; it reads the result one step later. A rank with flags blocks. If all ranks
    blocked, as for a log due by the step count, all act now. Otherwise the blocked ranks clear their flags, and all
    ranks act one step later.

    Every rank calls the same methods in the same order.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._read: Callable[[], list[int]] = lambda: [0, 0, *(0 for _ in FLAGS)]  # nothing was sent yet
        self._put_off: set[str] = set()

    def on_flags(self, control: TrainerControl, number: int, *, waits: bool = False) -> int:
        """Send a number and the flags, and set the flags to what all ranks do now.

        Return the largest number of the last exchange. With `waits` every rank blocks, so that requests of any rank
        apply now.
        """
        before = self.last_number()
        wanted = [getattr(control, flag) or flag in self._put_off for flag in FLAGS]
        self._put_off = set()
        waits = waits or any(wanted)
        self._send(number, wanted, goes_on=not waits)
        if waits:
            _, some_went_on, *flags = self._read()
            for name, is_wanted in zip(FLAGS, flags, strict=True):
                setattr(control, name, bool(is_wanted and not some_went_on))
        return before

    def on_number(self, number: int) -> int:
        """Send a number without flags, and return the largest of the last exchange."""
        before = self.last_number()
        self._send(number, [False for _ in FLAGS], goes_on=True)
        return before

    def last_number(self) -> int:
        """Return the largest number of the last exchange, 0 without one."""
        number, some_went_on, *flags = self._read()
        if some_went_on:
            self._put_off |= {name for name, is_wanted in zip(FLAGS, flags, strict=True) if is_wanted}
        return number

    def _send(self, number: int, wanted: list[bool], *, goes_on: bool) -> None:
        self._read = self._collectives.all_reduce_max([number, int(goes_on), *map(int, wanted)])
