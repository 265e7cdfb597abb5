"""Whole runs that push to the Hub, and go on from it on another machine."""

import hashlib
import importlib.util
import io
import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from shared.data import rows
from shared.models import Classifier

from tr_ckpt.testing import set_hub_delays
from tr_core import Trainer, TrainerCallback, TrainingArguments

# The client's own way of sending a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning")

# What a model is pushed as: the files of `trainer.md` 1.21, with the arguments as JSON.
MODEL = {"model.safetensors", "training_args.json"}
RUN = {"metrics.jsonl"}
CARD = {"README.md"}
PARTS = ("callbacks", "run", "scheduler", "settings", "trainer_state")
CHECKPOINT = MODEL | {"manifest.json", "model.json", "optimizer.json", "optimizer.safetensors", "rng-0.json"} | {
    "rng-0.safetensors", *(f"{name}.json" for name in PARTS)
}  # fmt: skip


def make_model():
    torch.manual_seed(0)
    return Classifier()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub on loopback of tr-ckpt's tests."""
    path = Path(__file__).parent.parent / "packages/tr-ckpt/tests/minihub.py"
    spec = importlib.util.spec_from_file_location("minihub_of_trainer_tests", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    with module.MiniHub() as server:
        server.token, server.wait_until = module.TOKEN, module.wait_until
        settings = {
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def make_trainer(folder, hub, callbacks=(), **changes):
    options = {
        "max_steps": 6,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "push_to_hub": True,
        "hub_token": hub.token,
        "hub_always_push": True,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    return Trainer(make_model(), args, train_dataset=rows(20), eval_dataset=rows(9, 1), callbacks=list(callbacks))


def inside(folder, names=CHECKPOINT):
    return {f"{folder}/{name}" for name in names}


def commits(hub, name="ci/run"):
    """Return the title and the files of every commit."""
    return [(commit.title, set(hub.tree(name, commit.oid))) for commit in hub.history(name)[1:]]


def expected(strategy, steps):
    """Return the title and the files of every commit of a run that saves at `steps`."""
    made, held = [], set()
    for step in steps if strategy != "end" else ():
        held = held | MODEL | RUN
        if strategy == "checkpoint":
            held = held | inside("last-checkpoint")
        if strategy == "all_checkpoints":
            held = held | inside(f"checkpoint-{step}")
        made.append((f"Training in progress, step {step}", held))
    return [*made, ("End of training", held | MODEL | RUN | CARD)]


# Every change saves in the background; a night saves at once too.
SAVES = pytest.mark.parametrize("save_async", [pytest.param(False, marks=pytest.mark.slow), True])


@SAVES
@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_each_strategy_pushes_exactly_its_files(strategy, save_async, hub, tmp_path):
    """In every commit, with older checkpoints removed from the disk meanwhile."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "_private").write_text("stays at home")
    (folder / ".hidden").write_text("stays at home")
    trainer = make_trainer(folder, hub, hub_strategy=strategy, save_async=save_async, save_total_limit=1)
    trainer.train()
    assert commits(hub) == expected(strategy, (2, 4, 6))
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-6"]
    assert not list(folder.glob(".tmp-*"))
    if strategy != "end":
        for commit, step in zip(hub.history("ci/run")[1:], (2, 4, 6), strict=False):
            place = {"checkpoint": "last-checkpoint/", "all_checkpoints": f"checkpoint-{step}/"}.get(strategy)
            if place:
                assert json.loads(commit.tree[f"{place}trainer_state.json"].content)["global_step"] == step
                assert commit.tree[f"{place}model.safetensors"] == commit.tree["model.safetensors"]


def test_with_every_commit_failing_the_run_ends_normally_and_says_what_was_not_pushed(hub, tmp_path, caplog):
    hub.fail("POST", "/commit/", status=500, times=10**6)
    trainer = make_trainer(tmp_path / "run", hub, hub_strategy="checkpoint")
    set_hub_delays(hub_callback(trainer).repository, (0,))
    assert trainer.train().global_step == 6
    assert hub.titles("ci/run") == ["initial commit"]
    [summary] = [record.message for record in caplog.records if record.message.startswith("not all of the run is at")]
    for step in (2, 4, 6):
        assert f"'Training in progress, step {step}'" in summary
    assert "'End of training'; last: " in summary
    assert "push it later with trainer.push_to_hub(), or with: hf upload ci/run " in summary
    hub.heal()
    trainer.push_to_hub()
    assert set(hub.files("ci/run")) == MODEL | RUN | CARD | inside("last-checkpoint")
    assert json.loads(hub.read("ci/run", "last-checkpoint/trainer_state.json"))["global_step"] == 6


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_that_the_end_of_a_run_waits_for_the_hub_and_so_does_a_push_later(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    trainer = make_trainer(tmp_path / "run", hub, disable_tqdm=False)
    trainer.train()
    at_end = sys.stderr.getvalue()
    assert "loading" in at_end.partition("training for 6 steps")[0]
    assert "uploading" in at_end.partition("training finished")[2]
    trainer.push_to_hub()
    assert "uploading" in sys.stderr.getvalue()[len(at_end) :]


def hub_callback(trainer):
    [found] = [callback for callback in trainer.callback_handler.callbacks if hasattr(callback, "push_to_hub")]
    return found


class Watching(TrainerCallback):
    """Notes the events of saves and pushes."""

    def __init__(self):
        self.seen = []

    def on_checkpoint(self, folder, step):
        self.seen.append(("checkpoint", step, (folder / "manifest.json").exists(), len(list(folder.parent.glob("c*")))))

    def on_push_begin(self, args, state, control, **kwargs):
        self.seen.append(("push", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(("save", state.global_step))


def test_callbacks_hear_of_every_checkpoint_before_an_older_one_goes(hub, tmp_path):
    watching = Watching()
    make_trainer(tmp_path / "run", hub, [watching], save_total_limit=1, max_steps=4).train()
    assert watching.seen == [
        ("push", 2), ("checkpoint", 2, True, 1), ("save", 2), ("push", 4), ("checkpoint", 4, True, 2), ("save", 4),
    ]  # fmt: skip


class OnlyCheckpoints:
    """Any object with the one method will do."""

    def __init__(self, *, fails=False):
        self.steps, self.fails = [], fails

    def on_checkpoint(self, folder, step):
        if self.fails:
            raise RuntimeError("no disk for statistics")
        self.steps.append(step)


@pytest.mark.parametrize("save_async", [False, True])
def test_a_callback_that_fails_at_a_checkpoint_harms_neither_it_nor_the_others(save_async, tmp_path, caplog):
    listener = OnlyCheckpoints()
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=4, save_steps=2, use_cpu=True, disable_tqdm=True,
        save_async=save_async,
    )  # fmt: skip
    trainer = Trainer(
        make_model(), args, train_dataset=rows(20), callbacks=[OnlyCheckpoints(fails=True), listener]
    )  # fmt: skip
    trainer.train()
    assert listener.steps == [2, 4]
    assert "checkpoint-4 is saved, but on_commit failed" in caplog.text


@pytest.mark.parametrize("save_async", [False, True])
def test_saves_by_epoch_are_named_by_epoch(save_async, hub, tmp_path):
    trainer = make_trainer(
        tmp_path / "run", hub, save_strategy="epoch", max_steps=-1, num_train_epochs=2, save_async=save_async
    )
    trainer.train()
    titles = [title for title, _ in commits(hub)]
    assert titles == ["Training in progress, epoch 1", "Training in progress, epoch 2", "End of training"]


def test_training_goes_on_while_a_push_is_slow(hub, tmp_path, caplog):
    """The upload of the first save is held until the last step is done; the saves in between are left out."""

    class Releasing(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)
            gate.set()

    steps = []
    trainer = make_trainer(tmp_path / "run", hub, hub_always_push=False, hub_strategy="checkpoint")
    caplog.set_level(logging.INFO, logger="tr_ckpt")  # which the trainer set
    trainer.callback_handler.add(Releasing(), first=True)
    hub.wait_until(lambda: "ci/run" in hub.repositories)
    gate = hub.hold("POST", "/preupload/")
    trainer.train()
    assert steps == [6]
    assert [title for title, _ in commits(hub)] == ["Training in progress, step 2", "End of training"]
    assert "step 4 is not pushed: an earlier push is still under way" in caplog.text
    # What the last save would have pushed is there at the end.
    assert json.loads(hub.read("ci/run", "last-checkpoint/trainer_state.json"))["global_step"] == 6


# On demand


def test_a_model_that_is_saved_after_training_is_pushed(hub, tmp_path, caplog):
    trainer = make_trainer(tmp_path / "run", hub, max_steps=2)
    trainer.train()
    before = hub.read("ci/run", "model.safetensors")
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1)
    trainer.save_model()
    assert hub.titles("ci/run")[-1] == "Model save"
    assert hub.read("ci/run", "model.safetensors") != before
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1)
    trainer.save_model(tmp_path / "elsewhere")  # is pushed from `output_dir` all the same
    saved = (tmp_path / "elsewhere" / "model.safetensors").read_bytes()
    assert hub.read("ci/run", "model.safetensors") == saved
    hub.fail("POST", "/commit/", status=403)
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1)
    trainer.save_model()
    assert "the model is saved, but not pushed: 'Model save' was not pushed to ci/run: " in caplog.text
    assert hub.read("ci/run", "model.safetensors") == saved


def test_without_push_to_hub_a_saved_model_is_not_pushed(hub, tmp_path):
    trainer = make_trainer(tmp_path / "run", hub, push_to_hub=False, max_steps=2)
    trainer.train()
    trainer.save_model()
    assert hub.log == []


class Overriding(Trainer):
    """An override as others have it."""

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)


def test_an_override_of_save_model_pushes_once(hub, tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, push_to_hub=True, hub_token=hub.token, use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Overriding(make_model(), args, train_dataset=rows(20))
    trainer.train()
    assert [title for title, _ in commits(hub)] == ["End of training"]
    trainer.push_to_hub("Again", tags="new")
    assert [title for title, _ in commits(hub)] == ["End of training", "Again"]


def test_a_push_on_demand_takes_what_the_reference_takes(hub, tmp_path):
    trainer = make_trainer(tmp_path / "run", hub, push_to_hub=False, max_steps=2, hub_token=None, hub_model_id="ci/one")
    trainer.train()
    trainer.evaluate()
    trainer.model.model_tags = ["from-the-model"]
    address = trainer.push_to_hub(
        "Mine",
        True,
        hub.token,
        "exp/1",
        True,
        language="en",
        license="mit",
        tags=["a"],
        model_name="One",
        tasks="other",
    )
    assert address.startswith(f"{hub.endpoint}/ci/one/commit/")
    assert hub.repositories["ci/one"].private
    assert hub.titles("ci/one", "exp/1")[-1] == "Mine"
    assert hub.titles("ci/one") == ["initial commit"]
    card = ModelCard(hub.read("ci/one", "README.md", "exp/1").decode())
    assert (card.data.language, card.data.license, card.data.model_name) == (["en"], "mit", "One")
    assert card.data.tags == ["a", "generated_from_trainer", "from-the-model"]
    future = trainer.push_to_hub(blocking=False, token=hub.token, revision="exp/1", tags=["b"])
    assert future.result(60).startswith(hub.endpoint)
    assert hub.titles("ci/one", "exp/1")[-1] == "End of training"


def test_the_card_shows_the_figures_of_the_run(hub, tmp_path):
    trainer = make_trainer(
        tmp_path / "run", hub, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, logging_steps=2
    )
    trainer.train()
    history = trainer.state.log_history
    losses = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    evaluated = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    card = ModelCard(hub.read("ci/run", "README.md").decode())
    [result] = card.data.eval_results
    assert result.metric_value == evaluated[trainer.state.best_global_step] == trainer.state.best_metric
    assert f"at step {trainer.state.best_global_step}" in card.text
    for step in (2, 4, 6):
        assert f"| {losses[step]:.4f} | {step / 5:.4f} | {step} | {evaluated[step]:.4f} |" in card.text
    assert f"- torch: {torch.__version__}" in card.text
    for value in ("learning_rate: 5e-05", "train_batch_size: 4", "training_steps: 6", "seed: 42"):
        assert f"- {value}\n" in card.text


# Before training


@pytest.mark.parametrize("name", ["a b", "C:\\runs\\one", "a--b", "x" * 97, "run.git"])
def test_a_name_that_can_be_no_repository_is_an_error_at_once(name, hub, tmp_path):
    with pytest.raises(ValueError, match="can be no repository on the Hub.*; it is the name of output_dir, as hub_mod"):
        make_trainer(tmp_path / name, hub)
    with pytest.raises(ValueError, match="can be no repository on the Hub: give hub_model_id as name or owner/name"):
        make_trainer(tmp_path / "run", hub, hub_model_id=f"ci/{name}")


def test_a_token_that_the_hub_refuses_is_an_error_before_training(hub, tmp_path):
    trainer = make_trainer(tmp_path / "run", hub, hub_token="hf_WRONGwrongWRONG")
    with pytest.raises(RuntimeError, match="nothing could be pushed; give a token that may write there as hub_token"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_dead_hub_keeps_nobody_from_training(hub, tmp_path, caplog):
    hub.stop()
    trainer = make_trainer(tmp_path / "run", hub, max_steps=2)
    set_hub_delays(hub_callback(trainer).repository, ())
    assert trainer.train().global_step == 2
    assert "not all of the run is at" in caplog.text


def test_the_token_is_in_no_file_and_no_message(hub, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    trainer = make_trainer(tmp_path / "run", hub, hub_strategy="all_checkpoints", max_steps=4)
    hub.fail("POST", "/commit/", status=403)
    trainer.train()
    trainer.push_to_hub(token=hub.token, tags="new")
    shown = capfd.readouterr()
    texts = [caplog.text, shown.out, shown.err, repr(trainer.args), str(trainer.args), repr(trainer.state)]
    assert not any(hub.token in text for text in texts)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.json" for path in files)
    assert not any(hub.token.encode() in path.read_bytes() for path in files)
    for commit in hub.history("ci/run"):
        assert not any(hub.token.encode() in blob.content for blob in commit.tree.values())


# Going on from the Hub


class Lost(Exception):
    """The machine is gone."""


class LosesTheMachine(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Lost


def digest(trainer):
    """Return a digest of weights, optimizer and log."""
    found = hashlib.sha256()
    for value in trainer.model.state_dict().values():
        found.update(value.numpy().tobytes())
    for state in trainer.optimizer.state_dict()["state"].values():
        for _, value in sorted(state.items()):
            found.update(value.numpy().tobytes())
    log = [{name: value for name, value in e.items() if not name.endswith(("_runtime", "_per_second"))}
           for e in trainer.state.log_history if "train_runtime" not in e]  # fmt: skip
    found.update(json.dumps(log, sort_keys=True).encode())
    return found.hexdigest()


@SAVES
@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_a_run_goes_on_from_the_hub_on_a_fresh_machine_and_ends_with_the_same_bits(strategy, save_async, hub, tmp_path):
    alone = make_trainer(tmp_path / "alone" / "run", hub, push_to_hub=False)
    alone.train()

    options = {"hub_strategy": strategy, "save_async": save_async, "save_total_limit": 1}
    lost = make_trainer(tmp_path / "lost" / "run", hub, [LosesTheMachine(5)], **options)
    with pytest.raises(Lost):
        lost.train()

    fresh = make_trainer(tmp_path / "fresh" / "run", hub, **options)
    fresh.train(resume_from_checkpoint="hub")
    assert digest(fresh) == digest(alone)
    assert hub.titles("ci/run")[-2:] == ["Training in progress, step 6", "End of training"]
    assert not list((tmp_path / "fresh" / "run").glob(".tmp-*"))

    other = make_trainer(tmp_path / "other", hub, push_to_hub=False, resume_from_checkpoint="hub:ci/run")
    other.train()  # nothing to do: the run is complete
    assert other.state.global_step == 6


class Preempted(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)


@SAVES
def test_what_a_signal_has_saved_is_pushed_before_the_process_ends(save_async, hub, tmp_path):
    """Also where an earlier push was under way when it was saved: on the Hub alone it outlives the machine."""
    alone = make_trainer(tmp_path / "alone" / "run", hub, push_to_hub=False)
    alone.train()
    options = {"hub_strategy": "checkpoint", "hub_always_push": False, "save_async": save_async}
    trainer = make_trainer(tmp_path / "run", hub, [Preempted()], **options)
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 128 + signal.SIGTERM
    assert hub.titles("ci/run")[-1] == "Training in progress, step 3"
    assert json.loads(hub.read("ci/run", "last-checkpoint/trainer_state.json"))["global_step"] == 3
    fresh = make_trainer(tmp_path / "fresh" / "run", hub, **options)
    fresh.train(resume_from_checkpoint="hub")
    assert digest(fresh) == digest(alone)


def test_a_run_whose_best_checkpoint_went_with_its_machine_ends_with_its_last_weights(hub, tmp_path, caplog):
    """Not with an error, which would cost the whole training; and the card shows the figures of those weights."""
    falling = iter(range(0, -100, -1))
    options = {
        "hub_strategy": "checkpoint", "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "score", "greater_is_better": True,
    }  # fmt: skip
    lost = make_trainer(tmp_path / "lost" / "run", hub, [LosesTheMachine(5)], **options)
    fresh = make_trainer(tmp_path / "fresh" / "run", hub, **options)
    for trainer in (lost, fresh):
        trainer.compute_metrics = lambda prediction: {"score": float(next(falling))}
    with pytest.raises(Lost):
        lost.train()
    shutil.rmtree(tmp_path / "lost")
    fresh.train(resume_from_checkpoint="hub")
    assert fresh.state.best_global_step == 2
    assert "the checkpoint of the best step, 2, is not at " in caplog.text
    assert hub.titles("ci/run")[-1] == "End of training"
    card = ModelCard(hub.read("ci/run", "README.md").decode())
    assert {result.metric_type: result.metric_value for result in card.data.eval_results}["score"] == -2.0
    assert "at step 6" in card.text


def test_there_is_nothing_on_the_hub_to_go_on_from(hub, tmp_path):
    trainer = make_trainer(tmp_path / "run", hub, hub_strategy="every_save", max_steps=2)
    trainer.train()
    with pytest.raises(ValueError, match=r"no checkpoint at .*/ci/run, commit \w+: it holds neither last-checkpoint/"):
        trainer.train(resume_from_checkpoint="hub")
    with pytest.raises(ValueError, match="/ci/nothing at main could not be read: RepositoryNotFoundError"):
        trainer.train(resume_from_checkpoint="hub:ci/nothing")


def test_a_malicious_pickle_in_the_place_of_a_checkpoints_file_executes_nothing(hub, tmp_path):
    import pickle

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    make_trainer(tmp_path / "run", hub, hub_strategy="checkpoint", max_steps=2).train()
    fresh = make_trainer(tmp_path / "fresh", hub, push_to_hub=False)
    held = [path for path in hub.files("ci/run") if path.startswith("last-checkpoint/")]
    for path in held:
        former = hub.read("ci/run", path)
        hub.replace("ci/run", path, pickle.dumps(Payload()))
        with pytest.raises(ValueError, match=path.removeprefix("last-checkpoint/").replace(".", r"\.")):
            fresh.train(resume_from_checkpoint="hub:ci/run")
        hub.replace("ci/run", path, former)
    assert not (tmp_path / "executed").exists()
    fresh.train(resume_from_checkpoint="hub:ci/run")


def test_a_later_training_with_another_folder_pushes_that_folder(hub, tmp_path):
    trainer = make_trainer(tmp_path / "first", hub, hub_model_id="ci/run", save_steps=6)
    trainer.train()
    (tmp_path / "first/notes.txt").write_text("of the first folder")
    trainer.args.output_dir = str(tmp_path / "second")
    (tmp_path / "second").mkdir()
    (tmp_path / "second/more.txt").write_text("of the second folder")
    trainer.train()
    files = hub.files("ci/run")
    assert "more.txt" in files
    assert "notes.txt" not in files
