"""Save and stop at a step boundary, on all ranks at the same step.

A signal asks for it, or a background save that failed. All ranks also log, evaluate, save and stop together if the
callbacks of only one rank ask for it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from tr_core.data.loaders import SeededLoader, saves_on_signal
from tr_core.preemption.signals import StopSignals, interrupted
from tr_core.protocols import Collectives
from tr_core.random_state import RandomState
from tr_core.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from tr_core.run import Run
    from tr_core.trainer.trainer import Trainer

# What ranks tell each other: 0, the number of a signal, or this, which is larger than any.
FAILED_SAVE = 1000


@contextmanager
def preemptible(trainer: Trainer, run: Run) -> Iterator[None]:
    """Surround training and its events: signals end it with a checkpoint, and a failed background save ends it.

    Without checkpoints there is nothing to write, and signals act as ever; a callback may still ask for one. What a
    callback of one rank asks for, all ranks do, in any run.
    """
    args, has_ranks = trainer.args, trainer.strategy.world_size > 1
    if not (args.save_async or saves_on_signal(args) or has_ranks):
        yield
        return
    interruption = run.interruption = Preemption(trainer, run)
    with ExitStack() as undo:
        undo.callback(interruption.forget)
        if args.save_async or has_ranks:
            interruption.listen()
        if saves_on_signal(args):
            undo.enter_context(interruption.signals)
        yield


class Preemption:
    """Ends a run between two steps, after a signal or because a checkpoint could not be written.

    The first signal is looked at when a step ends, after all callbacks: the step is logged if that is due, saved, and
    `Interrupted` raised. An evaluation that is due then, or under way, is left out; the checkpoint notes it, and the
    resumed run begins with it. A run whose last step it is ends as if nothing had come, unless it is in an evaluation.

    With one process nothing here is called before a signal came, unless checkpoints are written in the background,
    for then each step looks whether that failed. With several ranks one host-side exchange a step travels while the
    next one computes, so that all of them stop at the step after the one in which the signal was seen. The flags that
    callbacks set travel with it (`StepAgreement`).

    Args:
        trainer: whose run it is.
        run: the run.

    Attributes:
        signals: the block in which signals are noted.
    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self._trainer, self._run, self._strategy = trainer, run, trainer.strategy
        self._listeners: dict[str, Callable[..., None]] = {"on_step_end": self._after_step, "on_save": self._after_save}
        if trainer.args.save_async or saves_on_signal(trainer.args):
            self._listeners["on_prediction_step"] = self._after_prediction_step
        self._agreement = None
        if trainer.strategy.world_size > 1:
            self._agreement = FlagSync(trainer.strategy)
            self._listeners |= dict.fromkeys(("on_train_begin", "on_epoch_end"), self._after_other)
        self.signals = StopSignals(self._note, watches=trainer.strategy.world_size > 1)
        self._agreed, self._is_leaving = 0, False
        self._error: Exception | None = None
        self._before_evaluation: _StateBeforeEvaluation | None = None

    def listen(self) -> None:
        """Look at every step, evaluation batch and save from now on; a signal handler may call this."""
        for event, method in self._listeners.items():
            self._trainer.callback_handler.listen(event, method)

    def forget(self) -> None:
        """Listen no longer."""
        for event, method in self._listeners.items():
            self._trainer.callback_handler.unlisten(event, method)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surround an evaluation between two steps, which a signal cuts short: what it changed is put back first."""
        self._before_evaluation = before = _StateBeforeEvaluation(self._trainer)
        try:
            yield
            self.agree_on_flags()
        except _EvaluationInterrupted:
            before.put_back(self._trainer)
            self._owe(saves=self._trainer.control.should_save)
            self._is_leaving = True
            self._trainer.save_checkpoint(self._run)
            self._trainer.fire("on_save")
        finally:
            self._before_evaluation = None

    def agree_on_flags(self) -> None:
        """Have all ranks do what the callbacks of any ask for, at a place to which all come together."""
        if self._agreement is not None:
            self._is_asked(self._trainer.control, waits=True)

    def settle(self) -> None:
        """Wait, after the last step, for what is being written; all ranks call it.

        Raises:
            Exception: it could not be written.
        """
        if self._agreement is not None:
            self._take(self._agreement.last_number())
        if self._writes():
            self._trainer.checkpointer().wait()
        if number := self._agreed or self.signals.number:
            self._trainer.logger.info(
                "%s came with the run's last step: it is complete, and ends as if there had been none",
                signal.Signals(number).name,
            )

    def settle_after(self, error: BaseException) -> None:
        """Wait, after an exception, for what this rank is writing; what that fails with becomes a note of `error`.

        Nothing is asked of other ranks, which may be gone or elsewhere.
        """
        if not self._writes():
            return
        checkpointer = self._trainer.checkpointer()
        try:
            checkpointer.path(self._trainer.state.global_step)  # which waits
            checkpointer.check()
        except Exception as failure:
            error.add_note(f"besides, in the background: {type(failure).__name__}: {failure}")

    def _writes(self) -> bool:
        args = self._trainer.args
        return args.save_async and (args.save_strategy != "no" or self._run.has_saved)

    def _note(self) -> None:
        # In a signal handler, where a log line could meet the lock of one that is being written.
        self.listen()
        if self._strategy.rank == 0:
            text = f"{signal.Signals(self.signals.number).name}: saving and stopping when this step is done"
            with contextlib.suppress(OSError):
                os.write(2, f"\n{text}; a second one stops at once\n".encode())

    def _after_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A pass that a callback ends here has its own end to come; the next step is soon enough.
        if not self._is_asked(control) or control.should_training_stop or control.should_epoch_stop:
            return
        if control.should_evaluate:
            self._owe(saves=control.should_save)
        control.should_evaluate, control.should_save = False, True
        self._is_leaving = True

    def _after_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._before_evaluation is None:  # an evaluation that a callback makes is that callback's own
            return
        # A loader of the user's own may give each rank another number of batches, and so of chances to agree.
        if self._strategy.world_size > 1 and not isinstance(kwargs["eval_dataloader"], SeededLoader):
            return
        if self._is_asked(None):
            raise _EvaluationInterrupted

    def _after_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_leaving:
            self._leave(args, state)
        is_asked = self._is_asked(control, waits=True)
        if is_asked and not (control.should_training_stop or control.should_epoch_stop):
            self._leave(args, state)

    def _after_other(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.agree_on_flags()

    def _leave(self, args: Any, state: TrainerState) -> NoReturn:
        trainer = self._trainer
        if args.save_async:
            trainer.checkpointer().wait()
        error = interrupted(self._agreed, state.global_step, trainer.checkpointer().path(state.global_step))
        trainer.logger.warning(
            "%s: stopping with exit code %d at step %d of %d, saved as %s; %s",
            error.signal.name,
            error.code,
            state.global_step,
            state.max_steps,
            error.checkpoint,
            _how_to_resume(trainer),
        )
        raise error

    def _owe(self, *, saves: bool) -> None:
        self._run.owed = ["evaluate", *(["save"] if saves else [])]

    def _is_asked(self, control: TrainerControl | None, *, waits: bool = False) -> bool:
        """Whether all ranks know of a signal; every rank asks as often as the others.

        Args:
            control: the flags on which ranks then agree, None where they have no meaning.
            waits: have all ranks wait for each other, to do what any of them asks for at once.

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
                self._trainer.checkpointer().check()
            except Exception as error:  # raised on all ranks together, once they know of it
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


class _EvaluationInterrupted(BaseException):  # not an Exception: nothing on its way may take it for a failure
    """Ends an evaluation that a resumed run will make anew."""


class _StateBeforeEvaluation:
    """What an evaluation that is cut short has changed of a run's state, as it was before."""

    def __init__(self, trainer: Trainer) -> None:
        self._generators = RandomState(trainer.strategy.device).state_dict()
        self._callbacks = copy.deepcopy(trainer.callback_handler.state_dict())
        self._num_entries = len(trainer.state.log_history)

    def put_back(self, trainer: Trainer) -> None:
        RandomState(trainer.strategy.device).load_state_dict(self._generators)
        trainer.callback_handler.load_state_dict(self._callbacks)
        del trainer.state.log_history[self._num_entries :]


def _how_to_resume(trainer: Trainer) -> str:
    if trainer.args.save_only_model:
        return "save_only_model=True, so the checkpoint holds the weights, but no run can go on from it"
    if trainer.search is not None:
        return "hyperparameter_search(resume=True) with the same arguments goes on from there"
    return "train(resume_from_checkpoint=True) with the same arguments goes on from there"


FLAGS = tuple(flag.name for flag in fields(TrainerControl))


class FlagSync:
    """What ranks tell each other between two steps, in one exchange: a number, and the flags their callbacks set.

    A rank with no flag set does not wait: while the exchange travels it goes on with the next step, and hears at the
    end of that what was said. A rank with a flag waits. So where every rank has one, as when a log is due by the
    count of steps, all hear at once and do what any of them asks for. Where some rank has none, it has gone on; the
    others then leave their flags as if they were not set, and all do it together one step later.

    Every rank calls the same methods in the same order.

    Args:
        collectives: how ranks exchange it.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._read: Callable[[], list[int]] = lambda: [0, 0, *(0 for _ in FLAGS)]  # nothing was told yet
        self._put_off: set[str] = set()

    def on_flags(self, control: TrainerControl, number: int, *, waits: bool = False) -> int:
        """Tell a number and the flags, and change these to what all ranks do now.

        Args:
            control: the flags of this rank.
            number: the number of this rank.
            waits: have all ranks wait, so that what any of them asks for is done now.

        Returns:
            The largest number that was told the last time.
        """
        before = self.last_number()
        wanted = [getattr(control, flag) or flag in self._put_off for flag in FLAGS]
        self._put_off = set()
        waits = waits or any(wanted)
        self._tell(number, wanted, goes_on=not waits)
        if waits:
            _, some_went_on, *flags = self._read()
            for name, is_wanted in zip(FLAGS, flags, strict=True):
                setattr(control, name, bool(is_wanted and not some_went_on))
        return before

    def on_number(self, number: int) -> int:
        """Tell a number alone, and return the largest that was told the last time."""
        before = self.last_number()
        self._tell(number, [False for _ in FLAGS], goes_on=True)
        return before

    def last_number(self) -> int:
        """Return the largest number that was told the last time, 0 if none was."""
        number, some_went_on, *flags = self._read()
        if some_went_on:
            self._put_off |= {name for name, is_wanted in zip(FLAGS, flags, strict=True) if is_wanted}
        return number

    def _tell(self, number: int, wanted: list[bool], *, goes_on: bool) -> None:
        self._read = self._collectives.agree([number, int(goes_on), *map(int, wanted)])
