"""Pushes to a Hub: the right files, in order, whatever happens on the way."""

import json
import logging
import sys
import threading
from types import SimpleNamespace

import pytest
from ckpt_hub import Run
from ckpt_parts import parts
from minihub import TOKEN, wait_until

from tr_ckpt import HubCallback, HubRepository, PushError

# The client's own way of sending a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning")

MODEL = ["config.json", "model.safetensors"]
CHECKPOINT = ["config.json", "extra.json", "extra.safetensors", "manifest.json", "model.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("strategy", "during", "after"),
    [
        ("end", [], ["README.md", "config.json", "metrics.jsonl", "model.safetensors"]),
        ("every_save", ["metrics.jsonl", *MODEL], ["README.md", *MODEL, "metrics.jsonl"]),
        (
            "checkpoint",
            ["metrics.jsonl", *MODEL, *(f"last-checkpoint/{name}" for name in CHECKPOINT)],
            ["README.md", "metrics.jsonl", *MODEL, *(f"last-checkpoint/{name}" for name in CHECKPOINT)],
        ),
        (
            "all_checkpoints",
            ["metrics.jsonl", *MODEL, *(f"checkpoint-{step}/{name}" for step in (1, 2) for name in CHECKPOINT)],
            ["README.md", "metrics.jsonl", *MODEL]
            + [f"checkpoint-{step}/{name}" for step in (1, 2) for name in CHECKPOINT],
        ),
    ],
)
def test_each_strategy_pushes_exactly_its_files(strategy, during, after, hub, tmp_path, caplog):
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    (output_dir / "metrics.jsonl").write_text("{}\n")
    (output_dir / "_private").write_text("stays at home")
    (output_dir / ".hidden").write_text("stays at home")
    (output_dir / "profile").mkdir()
    (output_dir / "profile" / "step-1.trace.json.gz").write_bytes(b"stays at home")
    run = Run(output_dir, hub, strategy=strategy)
    for step in (1, 2):
        run.push(step)
    assert hub.files("ci/run") == sorted(during)
    if strategy != "end":
        assert json.loads(hub.read("ci/run", "config.json")) == {"step": 2}
    with caplog.at_level(logging.INFO):
        run.finish()
    assert hub.files("ci/run") == sorted(after)
    assert hub.read("ci/run", "model.safetensors") == b"final"
    assert f"the run is pushed to {hub.endpoint}/ci/run" in caplog.text
    progress = [] if strategy == "end" else [f"Training in progress, step {step}" for step in (1, 2)]
    assert hub.titles("ci/run") == ["initial commit", *progress, "End of training"]
    assert not list(output_dir.glob(".tmp-*"))
    assert not (output_dir / "config.json").exists()  # nothing is written into the run's folder


def test_a_push_holds_what_was_there_when_it_was_asked_for(hub, tmp_path):
    """Slow uploads, a checkpoint that is removed and files that are rewritten meanwhile."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("1")
    run = Run(tmp_path / "out", hub, strategy="all_checkpoints", always_push=True, keep_last=1)
    gate = hub.hold("POST", "/preupload/")
    run.save(1)
    (tmp_path / "out" / "metrics.jsonl").write_text("2")
    run.save(2)
    run.save(3)
    assert run.checkpointer.steps() == [3]
    gate.set()
    run.settle()
    assert hub.titles("ci/run")[1:] == [f"Training in progress, step {step}" for step in (1, 2, 3)]
    for step in (1, 2, 3):
        assert json.loads(hub.read("ci/run", f"checkpoint-{step}/config.json")) == {"step": step}
    commits = list(hub.repositories["ci/run"].commits.values())
    assert [commit.tree["metrics.jsonl"].content for commit in commits[1:]] == [b"1", b"2", b"2"]


@pytest.mark.parametrize(("always", "pushed"), [(False, [1]), (True, [1, 2])])
def test_a_save_while_a_push_runs_is_skipped_unless_always(always, pushed, hub, tmp_path, caplog):
    run = Run(tmp_path / "out", hub, always_push=always)
    gate = hub.hold("POST", "/preupload/")
    with caplog.at_level(logging.INFO):
        run.save(1)
        run.save(2)
    gate.set()
    run.settle()
    assert hub.titles("ci/run")[1:] == [f"Training in progress, step {step}" for step in pushed]
    assert ("step 2 is not pushed: an earlier push is still under way" in caplog.text) is not always


@pytest.mark.parametrize("status", [400, 403])
def test_a_request_that_is_at_fault_is_not_tried_again(status, hub, tmp_path, caplog):
    run = Run(tmp_path / "out", hub)
    run.settle()
    hub.fail("POST", "/commit/", status=status, times=9)
    run.push(1)
    assert sum("/commit/" in path for _, path in hub.log) == 1
    assert "trying again" not in caplog.text


def test_a_dead_hub_harms_nothing(hub, tmp_path, caplog):
    hub.stop()
    run = Run(tmp_path / "out", hub)
    run.save(1)
    run.finish()
    assert "ci/run" not in hub.repositories
    assert f"run could not be made on {hub.endpoint}: " in caplog.text
    assert "not all of the run is at" in caplog.text
    assert run.checkpointer.steps() == [1]


@pytest.mark.parametrize("token", ["hf_WRONGwrongWRONG", "hf_BROKEN\nbroken"])
def test_a_wrong_token_is_reported_before_the_first_save_and_is_in_no_message(token, hub, tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, logger="tr_ckpt"):
        run = Run(tmp_path / "out", hub, token=token)
        run.settle()
        assert f"run could not be made on {hub.endpoint}: " in caplog.text
        with pytest.raises(PushError) as caught:
            run.callback.push_to_hub(tmp_path)
        run.finish()
    told = caplog.text + str(caught.value) + repr(run.repository) + repr(run.callback)
    assert token not in told
    assert token.splitlines()[0] not in told


def test_a_run_without_files_of_its_own_ends_with_its_last_checkpoints_model(hub, tmp_path):
    run = Run(tmp_path / "out", hub, strategy="end")
    run.save(4)
    run.fire("on_train_end", error=None)
    assert hub.files("ci/run") == MODEL


def test_a_run_that_ends_with_its_best_weights_pushes_those(hub, tmp_path):
    run = Run(tmp_path / "out", hub, strategy="end")
    for step in (4, 5):
        run.save(step)
    run.state.best_global_step = 4
    run.callback.on_train_end(SimpleNamespace(load_best_model_at_end=True), run.state, None, error=None)
    assert json.loads(hub.read("ci/run", "config.json")) == {"step": 4}


def test_pushing_never_writes_into_a_checkpoint(hub, tmp_path):
    """The pushed copy shares its files with the checkpoint; the run's own model of the same name must not."""
    run = Run(tmp_path / "out", hub, strategy="checkpoint")
    run.save(1)
    run.finish()
    assert run.checkpointer.restore(parts(), run.checkpointer.path(1)) == 1


def test_other_processes_push_nothing(hub, tmp_path):
    callback = HubCallback(HubRepository("run", token=TOKEN, endpoint=hub.endpoint), output_dir=tmp_path)
    other = SimpleNamespace(global_step=1, is_world_process_zero=False)
    for event in ("on_init_end", "on_train_begin", "on_train_end"):
        getattr(callback, event)(None, other, None)
    callback._queue.wait()
    assert hub.log == []
    Run(tmp_path / "main", hub).settle()
    assert hub.log, "the main process makes the repository at once"


@pytest.mark.parametrize("private", [None, True, False])
def test_the_repository_is_made_as_asked(private, hub, tmp_path):
    run = Run(tmp_path / "out", hub, private=private, repo_id="org/named", revision="exp/1")
    run.push(1)
    assert hub.repositories["org/named"].private is bool(private)
    assert hub.files("org/named", "exp/1") == MODEL
    assert hub.files("org/named") == []


def test_a_repository_that_exists_is_used(hub, tmp_path):
    for step in (1, 2):
        run = Run(tmp_path / str(step), hub, revision="branch")
        run.push(step)
    assert hub.titles("ci/run", "branch")[1:] == ["Training in progress, step 1", "Training in progress, step 2"]


def test_files_that_cannot_be_copied_are_a_failed_push_and_no_more(hub, tmp_path, caplog):
    run = Run(tmp_path / "out", hub)
    run.callback.on_checkpoint(tmp_path / "out" / "checkpoint-7", 7)  # which is not there
    run.settle()
    assert "'Training in progress, step 7' was not pushed: its files could not be copied: " in caplog.text


def test_an_unknown_strategy_is_refused(hub, tmp_path):
    message = "hub_strategy='each' is not known; give one of end, every_save, checkpoint, all_checkpoints"
    with pytest.raises(ValueError, match=message):
        HubCallback(HubRepository("run", token=TOKEN), output_dir=tmp_path, strategy="each")


def test_without_the_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"the Hub needs huggingface_hub; pip install 'tr-ckpt\[hub\]'"):
        HubRepository("run")


def test_pushing_happens_in_one_background_thread(hub, tmp_path):
    run = Run(tmp_path / "out", hub)
    gate = hub.hold("POST", "/preupload/")
    run.save(1)
    wait_until(lambda: any("/preupload/" in path for _, path in hub.log))
    assert run.callback._queue.is_busy()
    assert [thread.name for thread in threading.enumerate() if "hub-push" in thread.name]
    gate.set()
    run.settle()
    assert not run.callback._queue.is_busy()
