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
from typing import Any, NoReturn, Protocol

import torch

from tr_args import TrainingArguments
from tr_core.callback import CallbackList
from tr_core.data.loaders import SeededLoader, saves_on_signal
from tr_core.data.position import DataPosition
from tr_core.preemption.signals import StopSignals, interrupted
from tr_core.protocols import Checkpointer, Collectives
from tr_core.random_state import RandomState
from tr_core.state import TrainerControl, TrainerState
from tr_log import get_logger

logger = get_logger("tr_core.trainer")

# What ranks tell each other: 0, the number of a signal, or this, which is larger than any.
FAILED_SAVE = 1000


class Preemptible(Protocol):
    """What ends between two steps: a run, as it is when it is asked for.

    Attributes:
        args: the training arguments.
        state: what the run has reached.
        control: what happens next.
        callback_handler: the callbacks.
        search: the search that the run is a trial of, None for any other run.
    """

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackList
    search: Any

    def checkpointer(self) -> Checkpointer:
        """Return where checkpoints go."""
        ...


@contextmanager
def preemptible(preemption: Preemption | None) -> Iterator[None]:
    """Surround training and its events: signals end it with a checkpoint, and a failed background save ends it.

    Without checkpoints there is nothing to write, and signals keep their usual effect; a callback may still ask for
    one. What a callback of one rank asks for, all ranks do, in any run.

    Args:
        preemption: what `make_preemption` returned.
    """
    if preemption is None:
        yield
        return
    with ExitStack() as undo:
        undo.callback(preemption.forget)
        preemption.begin(undo)
        yield


def make_preemption(
    owner: Preemptible,
    strategy: Collectives,
    position: DataPosition,
    save: Callable[[], None],
    writes: Callable[[], bool],
) -> Preemption | None:
    """Return what ends a run between two steps; None where nothing does.

    The arguments are those of `Preemption`.
    """
    args = owner.args
    if not (args.save_async or saves_on_signal(args) or strategy.world_size > 1):
        return None
    return Preemption(owner, strategy, position, save, writes)


class Preemption:
    """Ends a run between two steps, after a signal or because a checkpoint could not be written.

    The first signal is looked at when a step ends, after all callbacks: the step is logged if that is due, saved, and
    `Interrupted` raised. An evaluation that is due then, or under way, is left out; the checkpoint notes it, and the
    resumed run begins with it. A run whose last step it is ends as if nothing had come, unless it is in an evaluation.

    With one process nothing here is called before a signal came, unless checkpoints are written in the background,
    for then each step looks whether that failed. With several ranks one host-side exchange a step travels while the
    next one computes, so that all of them stop at the step after the one in which the signal was seen. The flags that
    callbacks set travel with it (`FlagSync`).

    Args:
        owner: what is read of the run, each time it is needed.
        strategy: how ranks exchange what they know.
        position: where the evaluation is noted that an interruption skips.
        save: saves a checkpoint and fires `on_save`.
        writes: whether a checkpoint may be on its way to the disk in the background.

    Attributes:
        signals: the block in which signals are noted.
    """

    def __init__(
        self,
        owner: Preemptible,
        strategy: Collectives,
        position: DataPosition,
        save: Callable[[], None],
        writes: Callable[[], bool],
    ) -> None:
        self._owner, self._strategy, self._position, self._save, self._writes = owner, strategy, position, save, writes
        self._listeners: dict[str, Callable[..., None]] = {"on_step_end": self._after_step, "on_save": self._after_save}
        if owner.args.save_async or saves_on_signal(owner.args):
            self._listeners["on_prediction_step"] = self._after_prediction_step
        self._agreement = None
        if strategy.world_size > 1:
            self._agreement = FlagSync(strategy)
            self._listeners |= dict.fromkeys(("on_train_begin", "on_epoch_end"), self._after_other)
        self.signals = StopSignals(self._note, watches=strategy.world_size > 1)
        self._agreed, self._is_leaving = 0, False
        self._error: Exception | None = None
        self._before_evaluation: _StateBeforeEvaluation | None = None

    def begin(self, undo: ExitStack) -> None:
        """Note signals until `undo` ends; look at every step at once where a save or a rank may ask for an end."""
        args = self._owner.args
        if args.save_async or self._strategy.world_size > 1:
            self.listen()
        if saves_on_signal(args):
            undo.enter_context(self.signals)

    def listen(self) -> None:
        """Look at every step, evaluation batch and save from now on; a signal handler may call this."""
        for event, method in self._listeners.items():
            self._owner.callback_handler.listen(event, method)

    def forget(self) -> None:
        """Listen no longer."""
        for event, method in self._listeners.items():
            self._owner.callback_handler.unlisten(event, method)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surround an evaluation between two steps, which a signal cuts short: what it changed is put back first."""
        self._before_evaluation = before = _StateBeforeEvaluation(self._owner, self._strategy.device)
        try:
            yield
            self.agree_on_flags()
        except _EvaluationInterrupted:
            before.put_back()
            self._skip_evaluation(saves=self._owner.control.should_save)
            self._is_leaving = True
            self._save()
        finally:
            self._before_evaluation = None

    def agree_on_flags(self) -> None:
        """Have all ranks do what the callbacks of any ask for, at a place to which all come together."""
        if self._agreement is not None:
            self._is_asked(self._owner.control, waits=True)

    def settle(self) -> None:
        """Wait, after the last step, for what is being written; all ranks call it.

        Raises:
            Exception: it could not be written.
        """
        if self._agreement is not None:
            self._take(self._agreement.last_number())
        if self._writes():
            self._owner.checkpointer().wait()
        if number := self._agreed or self.signals.number:
            logger.info(
                "%s came with the run's last step: it is complete, and ends as if there had been none",
                signal.Signals(number).name,
            )

    def settle_after(self, error: BaseException) -> None:
        """Wait, after an exception, for what this rank is writing; what that fails with becomes a note of `error`.

        Nothing is asked of other ranks, which may be gone or elsewhere.
        """
        if not self._writes():
            return
        checkpointer = self._owner.checkpointer()
        try:
            checkpointer.path(self._owner.state.global_step)  # which waits
            checkpointer.check()
        except Exception as failure:
            error.add_note(f"besides, in the background: {type(failure).__name__}: {failure}")

    def _note(self) -> None:
        # In a signal handler, where a log line could meet the lock of one that is being written.
        self.listen()
        if self._strategy.rank == 0:
            text = f"{signal.Signals(self.signals.number).name}: saving and stopping when this step is done"
            with contextlib.suppress(OSError):
                os.write(2, f"\n{text}; a second one stops at once\n".encode())

    def _after_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A pass that a callback ends here has its own end to come; the next step is soon enough.
        if not self._is_asked(control) or control.should_training_stop or control.should_epoch_stop:
            return
        if control.should_evaluate:
            self._skip_evaluation(saves=control.should_save)
        control.should_evaluate, control.should_save = False, True
        self._is_leaving = True

    def _after_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._before_evaluation is None:  # an evaluation that a callback makes is that callback's own
            return
        # A loader of the user's own may give each rank another number of batches, and so of chances to agree.
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

    def _after_other(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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
                self._owner.checkpointer().check()
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

    def __init__(self, owner: Preemptible, device: torch.device) -> None:
        self._owner, self._device = owner, device
        self._generators = RandomState(device).state_dict()
        self._callbacks = copy.deepcopy(owner.callback_handler.state_dict())
        self._num_entries = len(owner.state.log_history)

    def put_back(self) -> None:
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
        self._read = self._collectives.all_reduce_max([number, int(goes_on), *map(int, wanted)])
