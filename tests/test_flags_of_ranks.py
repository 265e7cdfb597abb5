"""What a callback of one rank alone asks for, all ranks do together; what it asks for on all, at once."""

import pytest
from shared.data import rows
from shared.models import LinearClassifier

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import run_ranks

UNITS = {"transformer_layer_cls_to_wrap": ["Linear"]}
BACKENDS = {"ddp": {"strategy": "ddp"}, "fsdp": {"fsdp": "full_shard auto_wrap", "fsdp_config": UNITS}}


class Asks(TrainerCallback):
    """Sets flags at an event of a step."""

    def __init__(self, event, step, flags):
        self.flags, self.step = flags, step
        setattr(self, event, self.ask)

    def ask(self, args, state, control, **kwargs):
        return dict.fromkeys(self.flags, True) if state.global_step == self.step else None


class Notes(TrainerCallback):
    """Notes what was done at which step."""

    def __init__(self):
        self.done = []

    def on_log(self, args, state, control, logs, **kwargs):
        if "learning_rate" in logs:
            self.done.append(("log", state.global_step))

    def on_evaluate(self, args, state, control, **kwargs):
        self.done.append(("evaluate", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.done.append(("save", state.global_step))

    def on_epoch_end(self, args, state, control, **kwargs):
        self.done.append(("epoch", state.global_step))


def train(folder, asked, strategy="ddp", **options):
    """Return what was done, of two passes of six steps.

    Args:
        asked: of each rank the flags that its callbacks set, by event and step.
    """
    defaults = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "ddp_timeout": 60,
    }
    args = TrainingArguments(folder, **(defaults | BACKENDS[strategy] | options))
    data = rows(24)
    notes = Notes()
    trainer = Trainer(LinearClassifier(seed=0), args, train_dataset=data, eval_dataset=data[:4], callbacks=[notes])
    mine = asked[trainer.strategy.rank] if len(asked) > 1 else asked[0]
    for (event, step), flags in mine.items():
        trainer.add_callback(Asks(event, step, flags))
    trainer.train()
    trainer.strategy.close()
    return notes.done


def of_ranks(folder, *asked, **options):
    """Return what two ranks did, who agree on it."""
    first, second = run_ranks(run, 2, str(folder), asked, options, timeout_s=120)
    assert first == second
    return first


def run(folder, asked, options):
    return train(folder, asked, **options)


STOP, SAVE, LOG, EVALUATE = ("should_training_stop",), ("should_save",), ("should_log",), ("should_evaluate",)
WHOLE = [("epoch", 6), ("epoch", 12)]


@pytest.mark.parametrize("strategy", BACKENDS)
def test_a_stop_that_one_rank_asks_for_ends_all_at_the_next_step(strategy, tmp_path):
    done = of_ranks(tmp_path, {}, {("on_step_end", 3): STOP}, strategy=strategy)
    assert done == [("epoch", 4)]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_asks_for_is_done_by_all_at_the_next_step(rank, tmp_path):
    asked = [{}, {}]
    asked[rank] = {("on_step_end", 2): SAVE, ("on_step_begin", 7): LOG, ("on_optimizer_step", 8): EVALUATE}
    done = of_ranks(tmp_path, *asked)
    assert done == [("save", 3), ("epoch", 6), ("log", 9), ("evaluate", 9), ("epoch", 12)]
    assert (tmp_path / "checkpoint-3").is_dir()


def test_what_all_ranks_ask_for_is_done_at_that_step_as_on_one(tmp_path):
    asked = {("on_step_end", 2): LOG + EVALUATE, ("on_step_end", 4): SAVE, ("on_step_end", 9): STOP}
    done = of_ranks(tmp_path / "ranks", asked, asked)
    assert done == [("log", 2), ("evaluate", 2), ("save", 4), ("epoch", 6), ("epoch", 9)]
    assert train(str(tmp_path / "alone"), [asked], strategy="ddp", per_device_train_batch_size=4) == done


def test_where_all_ranks_wait_anyhow_what_one_asks_for_is_done_at_once(tmp_path):
    done = of_ranks(tmp_path, {}, {("on_step_end", 4): SAVE}, logging_strategy="steps", logging_steps=2)
    assert [entry for entry in done if entry[0] == "save"] == [("save", 4)]


def test_what_ranks_ask_for_apart_is_done_together(tmp_path):
    done = of_ranks(tmp_path, {("on_step_end", 3): SAVE}, {("on_step_end", 3): EVALUATE})
    assert done == [("evaluate", 3), ("save", 3), *WHOLE]


@pytest.mark.parametrize("event", ["on_log", "on_evaluate", "on_save"])
def test_what_one_rank_asks_for_in_an_event_that_all_have_is_done_at_that_step(event, tmp_path):
    asked = {"on_log": LOG, "on_evaluate": EVALUATE, "on_save": SAVE}[event]
    common = {("on_step_end", 3): asked}
    done = of_ranks(tmp_path, common, {**common, (event, 3): STOP})
    assert done == [(event.removeprefix("on_"), 3), ("epoch", 3)]


def test_a_save_that_one_rank_asks_for_in_a_log_is_made_at_that_step(tmp_path):
    done = of_ranks(tmp_path, {}, {("on_log", 4): SAVE}, logging_strategy="steps", logging_steps=4)
    assert ("save", 4) in done


def test_one_rank_can_end_the_run_where_a_pass_ends_or_training_begins(tmp_path):
    assert of_ranks(tmp_path, {("on_epoch_end", 6): STOP + SAVE}, {}) == [("epoch", 6), ("save", 6)]
    assert of_ranks(tmp_path, {("on_train_begin", 0): STOP}, {}) == []
    assert of_ranks(tmp_path, {}, {("on_evaluate", 0): STOP}, eval_on_start=True) == [("evaluate", 0)]


def test_one_rank_can_end_the_pass_of_all(tmp_path):
    done = of_ranks(tmp_path, {}, {("on_step_end", 2): ("should_epoch_stop",)})
    assert done == [("epoch", 3), ("epoch", 9)]


def test_what_is_put_off_at_the_last_step_of_a_pass_is_done_at_its_end(tmp_path):
    done = of_ranks(tmp_path, {}, {("on_step_end", 6): SAVE})
    assert done == [("epoch", 6), ("save", 6), ("epoch", 12)]


def test_a_save_that_one_rank_asks_for_at_the_last_step_is_made(tmp_path):
    done = of_ranks(tmp_path, {("on_step_end", 12): SAVE}, {})
    assert done == [("epoch", 6), ("save", 12), ("epoch", 12)]
