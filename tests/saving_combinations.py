"""Draw ways to save, to be interrupted and to go on, for the combinations of `combination_runs.py`."""

import dataclasses
import random
import signal
from pathlib import Path

from combination_runs import Combination, build, draw_combination, fingerprint
from shared.callbacks import Stop
from torch.utils.data import IterableDataset, get_worker_info

from tr_core.testing import Interrupted, set_clock

EVENTS = ("on_step_begin", "on_substep_end", "on_step_end", "on_prediction_step", "on_evaluate", "on_save", "on_log")


class Stream(IterableDataset):
    """Data without a length, which worker processes divide among them."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(self.samples[first::every])


class StreamWithPlace(IterableDataset):
    """The same on one process, and it knows its place."""

    def __init__(self, samples):
        self.samples, self.place, self.read = samples, 0, []

    def __iter__(self):
        first, self.place = self.place, 0
        for index in range(first, len(self.samples)):
            self.place = index + 1
            self.read.append(index)
            yield self.samples[index]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class InterruptAt:
    """Ends a run at an event of a step or a later one: by an exception, or by a signal that this process gets."""

    def __init__(self, event, step, number=None):
        self.step, self.number, self.has_acted = step, number, False
        setattr(self, event, self._act)

    def _act(self, args, state, control, **kwargs):
        if self.has_acted or state.global_step < self.step:
            return
        self.has_acted = True
        if self.number is None:
            raise Stop
        signal.raise_signal(self.number)


@dataclasses.dataclass(frozen=True)
class Interruption:
    """One end of a run before its end.

    Attributes:
        event: when it comes.
        step: completed steps at which it comes, or the first later one that has the event.
        number: of the signal; None for an exception.
        damages: whether the newest checkpoint is damaged then, if there is an older one.
        resume: how the run is gone on with.
    """

    event: str
    step: int
    number: int | None = None
    damages: bool = False
    resume: str | bool = "auto"


@dataclasses.dataclass(frozen=True)
class Saving:
    """A combination with a way to save, the kind of its data, and its interruptions.

    Attributes:
        combination: what is trained, and with which arguments.
        data: `rows`, `stream`, or `place` for a stream that knows its place.
        frozen: whether all but two layers are frozen.
        interruptions: in their order.
    """

    combination: Combination
    data: str = "rows"
    frozen: bool = False
    interruptions: tuple[Interruption, ...] = ()

    def __str__(self):
        return f"{self.data}{', frozen' * self.frozen} {self.interruptions} {self.combination}"


def draw_saving(number):
    """Return what a seed stands for."""
    draw = random.Random(f"saving {number}")
    base = draw_combination(number).but("torch_compile", "torch_compile_backend", dataloader_num_workers=0)
    options = {
        "save_async": draw.random() < 0.5,
        "save_keep_every": draw.choice([None, None, 2, 4]),
        "save_total_limit": draw.choice([None, 1, 1, 2]),
        "save_on_each_node": draw.random() < 0.2,
        "restore_callback_states_from_checkpoint": True,
    }
    kinds = ["steps", "steps", "epoch", "3s"]
    if "metric_for_best_model" in base.options:
        kinds.append("best")
    options["save_strategy"] = draw.choice(kinds)
    if draw.random() < 0.2:
        options["logging_strategy"] = "2s"
    if base.options["eval_strategy"] == "steps" and draw.random() < 0.3:
        options["eval_strategy"] = "2s"
    if "auto_find_batch_size" not in base.options and "overfit_batches" not in base.options:
        options["auto_find_batch_size"] = draw.random() < 0.2
    data = draw.choice(["rows", "rows", "stream", "place"])
    if data != "rows" and not ({"overfit_batches", "auto_find_batch_size"} & set(base.options)):
        options |= {"max_steps": draw.randint(16, 20), "train_sampling_strategy": "random"}
        options["auto_find_batch_size"] = False
        if data == "stream" and draw.random() < 0.15:
            options["dataloader_num_workers"] = 2
    else:
        data = "rows"
    interruptions, step = [], 0
    for _ in range(draw.choice([1, 1, 2, 3])):
        step += draw.randint(1, 5)
        interruptions.append(
            Interruption(
                draw.choice(EVENTS),
                step,
                draw.choice([None, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1]),
                damages=draw.random() < 0.25,
                resume=draw.choice(["auto", True, "folder"]),
            )
        )
    return Saving(base.but(**options), data, draw.random() < 0.2, tuple(interruptions))


def for_ranks(saving):
    """Return a way to save that several ranks can have: every rank's batch has more than one row."""
    return dataclasses.replace(saving, combination=saving.combination.but(number=36))


def make(saving, folder, callbacks=(), *, strategy=None, **changes):
    """Return a Trainer, and what keeps its last weights."""
    trainer, last = build(saving.combination, folder, callbacks, strategy=strategy, **changes)
    samples = trainer.train_dataset
    kinds = {"rows": list, "stream": Stream, "place": StreamWithPlace}
    trainer.train_dataset = kinds[saving.data](samples)
    if saving.frozen:
        for name, parameter in trainer.model.named_parameters():
            parameter.requires_grad_(name.startswith(("blocks.1", "head")))
    # A second passes with every step.
    set_clock(trainer.callback_handler.callbacks, lambda: float(trainer.state.global_step))
    return trainer, last


def run_alone(saving, folder, strategy=None, **changes):
    """Train to the end in one go."""
    trainer, last = make(saving, folder, strategy=strategy, **changes)
    trainer.train()
    return fingerprint(trainer, last)


def newest(trainer):
    """Return the folder of the newest checkpoint, None without one."""
    steps = trainer.checkpointer().steps()
    return str(trainer.checkpointer().path(steps[-1])) if steps else None


def damage(trainer):
    """Break the newest checkpoint, if it is not the only one."""
    steps = trainer.checkpointer().steps()
    if len(steps) > 1:
        file = trainer.checkpointer().path(steps[-1]) / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))


def run_interrupted(saving, folder, strategy=None, **changes):
    """Train with all interruptions, and return the last fingerprint and how the runs ended."""
    ends, resume = [], None
    for interruption in (*saving.interruptions, None):
        callbacks = [InterruptAt(interruption.event, interruption.step, interruption.number)] if interruption else []
        if (
            interruption
            and interruption.number
            and strategy
            and strategy.rank != interruption.step % strategy.world_size
        ):
            callbacks = []  # one rank gets the signal
        trainer, last = make(saving, folder, callbacks, strategy=strategy, **changes)
        try:
            trainer.train(resume_from_checkpoint=resume)
            ends.append(("end", trainer.state.global_step))
        except Stop:
            ends.append(("stop", trainer.state.global_step))
        except Interrupted as error:
            ends.append((signal.Signals(error.code - 128).name, error.step))
            if not error.checkpoint.is_dir() or error.step != trainer.state.global_step:
                raise AssertionError(f"{error}, at step {trainer.state.global_step}") from error
        if interruption is None or ends[-1][0] == "end":
            return fingerprint(trainer, last), ends
        if saving.combination.options["save_async"]:
            trainer.checkpointer().wait()
        if interruption.damages and trainer.strategy.rank == 0:
            damage(trainer)
        trainer.strategy.barrier()
        resume = "auto"
        if newest(trainer) is not None and not interruption.damages:
            resume = newest(trainer) if interruption.resume == "folder" else interruption.resume
    raise AssertionError


def left_behind(folder, saving):
    """Return what is wrong with the checkpoints of a finished run, in words."""
    options, wrong = saving.combination.options, []
    names = sorted(path.name for path in Path(folder).iterdir())
    if odd := [name for name in names if name.startswith(".") or "tmp" in name or "partial" in name]:
        wrong.append(f"left behind: {odd}")
    steps = sorted(int(name.split("-")[1]) for name in names if name.startswith("checkpoint-"))
    every, limit = options["save_keep_every"], options["save_total_limit"]
    free = [step for step in steps if not (every and step % every == 0)]
    if limit is not None and len(free) > limit + 1:  # the best one may be beyond the limit
        wrong.append(f"{steps} with limit {limit}, every {every}")
    return wrong
