"""SIGTERM at any instant of a small run: it leaves one checkpoint to go on from, and the run ends bit-equal."""

import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from shared.data import rows
from shared.models import Classifier
from shared.results import history

from tr_core import Trainer, TrainerCallback, TrainingArguments, set_seed
from tr_core.testing import EVENTS, Interrupted

STEPS = 8


def build(folder, *callbacks, in_background=False):
    set_seed(7)
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=5,
        metric_for_best_model="loss",
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        save_async=in_background,
    )
    return Trainer(Classifier(), args, train_dataset=rows(16), eval_dataset=rows(12), callbacks=list(callbacks))


def ending(trainer):
    """Everything that must be equal: log, best metric, weights and optimizer state."""
    moments = [v for state in trainer.optimizer.state_dict()["state"].values() for v in state.values()]
    return (history(trainer), trainer.state.best_metric), [*trainer.model.state_dict().values(), *moments]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    torch.set_num_threads(1)
    trainer = build(tmp_path_factory.mktemp("alone"))
    trainer.train()
    return ending(trainer)


def check_ends_as_alone(folder, alone, cut, in_background=False):
    """Train until the signal, look at what it left, and train on; return whether the signal ended the first run."""
    interrupted = None
    try:
        cut.train()
    except Interrupted as error:
        interrupted = error
    last = cut
    checkpoints = sorted(Path(folder).glob("*checkpoint-*"))
    if interrupted is not None:
        assert interrupted.code == 143
        assert interrupted.step == cut.state.global_step
        assert interrupted.checkpoint in checkpoints
        regular = {folder / f"checkpoint-{step}" for step in range(5, interrupted.step + 1, 5)}
        assert set(checkpoints) == regular | {interrupted.checkpoint}
        last = build(folder, in_background=in_background)
        last.train(resume_from_checkpoint=True)
    found = ending(last)
    assert found[0] == alone[0]
    for mine, theirs in zip(found[1], alone[1], strict=True):
        assert torch.equal(mine, theirs)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return interrupted is not None


class Storm:
    """A callback that sends SIGTERM at the n-th event of a run; one for every event there is."""

    def __init__(self, at):
        self.at, self.events = at, []


def _send(event):
    def method(self, args, state, control, **kwargs):
        self.events.append((event, state.global_step))
        if len(self.events) == self.at:
            signal.raise_signal(signal.SIGTERM)

    return method


for _event in EVENTS:
    if _event != "on_init_end":  # a run has not begun then, and the signal acts as ever
        setattr(Storm, _event, _send(_event))


@pytest.mark.slow
def test_at_each_event_of_a_run(tmp_path, alone):
    quiet = Storm(0)
    build(tmp_path / "quiet", quiet).train()
    ended = 0
    for at, event in enumerate(quiet.events, start=1):
        folder = tmp_path / str(at)
        try:
            ended += check_ends_as_alone(folder, alone, build(folder, Storm(at)))
        except AssertionError as error:
            error.add_note(f"the signal came at {event}, event {at} of {len(quiet.events)}")
            raise
    assert len(quiet.events) > 60
    assert ended > 0.7 * len(quiet.events)


class Instants(TrainerCallback):
    """Counts bytecode instructions while handlers are set, and sends SIGTERM at one of them."""

    def __init__(self, at=0):
        self.at, self.count = at, 0

    def on_train_begin(self, args, state, control, **kwargs):
        sys.settrace(self._enter)
        frame = sys._getframe()
        while frame is not None:  # the frames that are there already
            frame.f_trace, frame.f_trace_opcodes = self._see, True
            frame = frame.f_back

    def on_train_end(self, args, state, control, **kwargs):
        sys.settrace(None)

    def _enter(self, frame, event, arg):
        frame.f_trace_opcodes = True
        return self._see

    def _see(self, frame, event, arg):
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGTERM)
        return self._see


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_at_random_instants_between_two_instructions(tmp_path, alone, in_background):
    try:
        counter = Instants()
        build(tmp_path / "counted", counter, in_background=in_background).train()
        draw = random.Random(4)
        instants = sorted(draw.randrange(1, counter.count) for _ in range(20))
        ended = 0
        for at in instants:
            folder = tmp_path / str(at)
            cut = build(folder, Instants(at), in_background=in_background)
            try:
                ended += check_ends_as_alone(folder, alone, cut, in_background)
            except AssertionError as error:
                error.add_note(f"the signal came at instruction {at} of {counter.count}")
                raise
    finally:
        sys.settrace(None)
    assert counter.count > 50_000
    assert ended > 0.6 * len(instants)


@pytest.mark.slow
def test_at_random_moments_of_a_clock(tmp_path, alone):
    """SIGALRM comes whenever its time is over, also inside of what is not Python."""
    former = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    draw = random.Random(5)

    class Arm(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0001, 0.08))

        def on_train_end(self, args, state, control, **kwargs):
            signal.setitimer(signal.ITIMER_REAL, 0)

    try:
        ended = [check_ends_as_alone(tmp_path / str(n), alone, build(tmp_path / str(n), Arm())) for n in range(20)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert any(ended)
