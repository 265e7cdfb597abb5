"""Files of a run: models, states, processors, metrics, and what the log says of checkpoints."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Classifier
from torch import nn

import tr_core
from tr_core import TrainerCallback
from tr_core.checkpoint import saving
from tr_core.results import format_metrics, metric_lines


def test_a_saved_model_is_safetensors_with_the_arguments_beside_it(make_trainer, tmp_path, model):
    trainer = make_trainer()
    trainer.save_model(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(weights["layers.0.weight"], model.layers[0].weight)
    assert json.loads((tmp_path / "model" / "training_args.json").read_text())["num_train_epochs"] == 1


def test_tied_weights_are_saved_once_and_load_again(make_trainer, tmp_path):
    class Tied(Classifier):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(16, 3)
            self.again.weight = self.layers[3].weight

    model = Tied()
    make_trainer(model=model).save_model(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert "again.weight" not in weights
    other = Tied()
    other.load_state_dict(weights, strict=False)
    assert torch.equal(other.again.weight, model.again.weight)


def test_a_model_that_cannot_be_written_whole_leaves_what_was_there(make_trainer, monkeypatch, tmp_path, model):
    trainer, folder = make_trainer(), tmp_path / "model"
    trainer.save_model(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(state, path, **metadata):
        Path(path).write_bytes(b"the first half")
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(saving, "save_file", full)
        model.layers[0].weight.data += 1
        with pytest.raises(OSError, match="no space"):
            trainer.save_model(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    trainer.save_model(folder)
    assert torch.equal(load_file(folder / "model.safetensors")["layers.0.weight"], model.layers[0].weight)
    assert {path.name for path in folder.iterdir()} == set(before)


def test_a_model_of_one_file_takes_the_place_of_one_in_pieces(make_trainer, tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "notes.txt"):
        (tmp_path / name).write_text("of before")
    make_trainer().save_model(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("[mn]*")) == ["model.safetensors", "notes.txt"]


def test_files_that_cannot_be_written_stay_as_they_were(make_trainer, monkeypatch):
    trainer = make_trainer()
    trainer.save_metrics("train", {"train_loss": 1.0})
    trainer.save_state()
    trainer.create_model_card()
    really, folder = Path.open, Path(trainer.args.output_dir)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def full(self, mode="r", *more, **options):
        if "x" not in mode:
            return really(self, mode, *more, **options)
        with really(self, mode) as file:
            file.write(b"some")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        for write_again in (
            lambda: trainer.save_metrics("train", {"a": 2}),
            trainer.save_state,
            trainer.create_model_card,
        ):
            with pytest.raises(OSError, match="No space left"):
                write_again()
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_metrics_are_printed_readably(make_trainer, capsys):
    assert format_metrics({"eval_runtime": 3725.5, "total_flos": 2.0**31, "loss": 1.23456, "n": 3}) == {
        "eval_runtime": "1:02:05.50",
        "total_flos": "2GF",
        "loss": 1.2346,
        "n": 3,
    }
    assert format_metrics({"train_mem_cpu_alloc_delta": 3 * 2**20 + 5}) == {"train_mem_cpu_alloc_delta": "3MB"}
    assert metric_lines({"b": 1, "long": 2.5}) == ["  b    =   1", "  long = 2.5"]
    assert metric_lines({"a\nb": "c\u2028d"}) == ["  a\\nb = c\\u2028d"]  # a name cannot begin a line of its own
    make_trainer().log_metrics("train", {"loss": 1.0})
    assert capsys.readouterr().out == "***** train metrics *****\n  loss = 1.0\n"


# The output folder


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_file_in_the_way_is_found_before_training(make_trainer, tmp_path, monkeypatch, below):
    (tmp_path / "taken").touch()
    monkeypatch.setattr(saving, "build_checkpointer", lambda *given: MemoryCheckpointer(tmp_path))  # installed
    trainer = make_trainer(output_dir=str(tmp_path / "taken" / below), save_strategy="steps")
    with pytest.raises(ValueError, match=r"cannot be made: \S+taken is a file; give another .*save_strategy='no'"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_file_in_the_way_of_nothing_is_left_alone(make_trainer, tmp_path):
    (tmp_path / "taken").touch()
    own = MemoryCheckpointer(tmp_path / "elsewhere")
    options = {"output_dir": str(tmp_path / "taken"), "save_strategy": "epoch", "checkpointer": own}
    assert make_trainer(**options).train().global_step == 5
    assert own.saves == [5]


# Processors


class Processor:
    def __init__(self, name):
        self.name = name

    def save_pretrained(self, folder):
        (Path(folder) / "processor.txt").write_text(self.name, encoding="utf-8")


class Collator:
    def __init__(self, **held):
        vars(self).update(held)

    def __call__(self, rows):
        return tr_core.default_data_collator(rows)


def saved_by(make_trainer, tmp_path, **parts):
    make_trainer(train_dataset=samples(4), **parts).save_model(str(tmp_path / "saved_by"))
    file = tmp_path / "saved_by" / "processor.txt"
    return file.read_text(encoding="utf-8") if file.exists() else None


@pytest.mark.parametrize("name", ["tokenizer", "processor", "processing_class", "feature_extractor", "image_processor"])
def test_a_processor_that_only_the_collator_knows_is_saved(make_trainer, tmp_path, name):
    assert saved_by(make_trainer, tmp_path, data_collator=Collator(**{name: Processor("its")})) == "its"


def test_the_trainers_own_comes_first(make_trainer, tmp_path):
    parts = {"processing_class": Processor("own"), "data_collator": Collator(tokenizer=Processor("its"))}
    assert saved_by(make_trainer, tmp_path, **parts) == "own"


def test_a_collator_without_one_saves_nothing(make_trainer, tmp_path):
    assert saved_by(make_trainer, tmp_path, data_collator=Collator(tokenizer=None, processor="text")) is None


# What the log says


class Late(MemoryCheckpointer):
    """Completes a checkpoint when the next one begins or is waited for, as one that writes in the background may."""

    def __init__(self, folder):
        super().__init__(folder)
        self.commits = []

    def save(self, step, parts, *, on_commit=None, **others):
        self.wait()
        path = super().save(step, parts, **others)
        self.commits.append(lambda: on_commit(path))
        return path

    def wait(self):
        while self.commits:
            self.commits.pop()()


class Steps(TrainerCallback):
    def __init__(self, caplog):
        self.caplog, self.saved = caplog, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.saved[state.global_step] = saved(self.caplog)


def saved(caplog):
    return [int(text.rpartition("-")[2]) for text in caplog.messages if text.startswith("saved checkpoint ")]


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "tr_core.trainer")
    return caplog


def test_a_checkpoint_is_said_to_be_saved_once_it_is_complete(make_trainer, tmp_path, log):
    steps, own = Steps(log), Late(tmp_path)
    options = {"save_strategy": "steps", "save_steps": 2, "save_async": True, "log_level": "info"}
    make_trainer(checkpointer=own, callbacks=[steps], **options).train()  # five steps
    assert own.saves == [2, 4, 5]
    assert steps.saved[3] == []  # that of step 2 is still being written
    assert saved(log) == [2, 4, 5]


def test_a_finished_run_is_not_announced_and_says_how_to_continue(make_trainer, tmp_path, log):
    own = MemoryCheckpointer(tmp_path)
    options = {"save_strategy": "epoch", "checkpointer": own, "log_level": "info"}
    make_trainer(**options).train()
    log.clear()
    make_trainer(**options).train(resume_from_checkpoint=True)
    assert not any(text.startswith("training begins") for text in log.messages)
    assert log.messages[-1].endswith("the run is complete; a larger num_train_epochs or max_steps continues it")


class StopAtThree(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        return {"should_training_stop": state.global_step == 3}


# Models whose `state_dict` a script replaces


class OfClass(Classifier):
    def state_dict(self, *args, **kwargs):
        return {f"renamed.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


class Both(OfClass):
    """A class that loads what it gives."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict({name.removeprefix("renamed."): v for name, v in state_dict.items()}, strict)


def last_layer_alone(model):
    """Replace it as alpaca-lora's script does."""
    old = model.state_dict
    model.state_dict = (
        lambda self, *_, **__: {name: value for name, value in old().items() if name.startswith("layers.3")}
    ).__get__(model, type(model))
    return model


def of_class(model):
    own = OfClass()
    own.load_state_dict(model.state_dict())
    return own


def both(model):
    own = Both()
    nn.Module.load_state_dict(own, model.state_dict())
    return own


@pytest.mark.parametrize("change", [last_layer_alone, of_class, both])
def test_a_resumed_run_ends_as_one_that_never_stopped(make_trainer, change):
    def make(*callbacks, **options):
        torch.manual_seed(0)
        model = change(Classifier())
        keeper = options.setdefault("checkpointer", MemoryCheckpointer())
        trainer = make_trainer(
            20, model=model, callbacks=list(callbacks), save_strategy="steps", save_steps=3, **options
        )
        return trainer, keeper

    alone, _ = make()
    alone.train()
    stopped, keeper = make(StopAtThree())
    stopped.train()
    held = set(keeper.saved[3]["model"])
    whole = set(nn.Module.state_dict(alone.model))
    assert held == (set(alone.model.state_dict()) if change is both else whole)
    replaced = stopped.model.state_dict
    resumed, _ = make(checkpointer=keeper)
    resumed.train(resume_from_checkpoint=True)
    for mine, theirs in zip(alone.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert stopped.model.state_dict == replaced  # it is the script's own again


@pytest.mark.parametrize("change", [last_layer_alone, of_class, both])
def test_the_best_model_is_loaded_at_the_end(make_trained, change):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "load_best_model_at_end": True}
    scores = iter([1.0, 3.0, 2.0, 1.0, 0.0, 9.0])
    seen = []

    class Keep(TrainerCallback):
        def on_evaluate(self, args, state, control, model, **kwargs):
            seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())

    torch.manual_seed(0)
    trainer = make_trained(
        20,
        model=change(Classifier()),
        checkpointer=MemoryCheckpointer(),
        eval_dataset=samples(8, 1),
        compute_metrics=lambda prediction: {"score": next(scores)},
        metric_for_best_model="score",
        greater_is_better=True,
        callbacks=[Keep],
        **options,
    )
    assert trainer.state.best_global_step == 2
    assert torch.equal(nn.utils.parameters_to_vector(trainer.model.parameters()), seen[1])


@pytest.mark.parametrize(
    ("changes", "best"),
    [
        ({"save_strategy": "epoch", "eval_steps": 2}, 4),
        ({"save_strategy": "steps", "save_steps": 5, "eval_steps": 2}, 4),
        ({"save_strategy": "steps", "save_steps": 100, "eval_steps": 3}, 6),
    ],
)
def test_the_best_model_is_loaded_whenever_evaluations_and_checkpoints_are_made(make_trained, changes, best):
    """It is saved when it is found, also between two checkpoints."""
    scores = iter([0.1, 0.9, 0.5, 0.4, 0.3])
    seen = {}

    class Keep(TrainerCallback):
        def on_evaluate(self, args, state, control, model, **kwargs):
            seen[state.global_step] = nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    trainer = make_trained(
        18,
        num_train_epochs=2,
        checkpointer=MemoryCheckpointer(),
        eval_dataset=samples(9, 1),
        compute_metrics=lambda prediction: {"score": next(scores)},
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        callbacks=[Keep],
        **changes,
    )
    assert trainer.state.best_global_step == best
    assert torch.equal(nn.utils.parameters_to_vector(trainer.model.parameters()), seen[best])


def test_save_model_writes_what_the_script_chose(make_trainer, tmp_path):
    trainer = make_trainer(8, model=last_layer_alone(Classifier()))
    trainer.save_model(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == {"layers.3.weight", "layers.3.bias"}


def test_save_model_keeps_the_folders_of_a_model_that_writes_itself(make_trainer, tmp_path):
    class Own(Classifier):
        def save_pretrained(self, folder, state_dict=None):
            (Path(folder) / "1_Pooling").mkdir()
            (Path(folder) / "1_Pooling" / "config.json").write_text("{}")
            (Path(folder) / "2_Normalize").mkdir()  # a part without a setting

    trainer = make_trainer(model=Own())
    for _ in range(2):
        trainer.save_model(str(tmp_path / "model"))
    found = {str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").rglob("*")}
    assert found >= {"1_Pooling/config.json", "2_Normalize"}
    assert ".unfinished" not in found
