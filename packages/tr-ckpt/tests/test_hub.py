"""Pushes to a Hub: the right files, in order, whatever happens on the way."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from ckpt_parts import parts
from minihub import TOKEN, wait_until

from tr_ckpt import Checkpointer, HubCallback, HubRepository, PushError

# The client's own way of sending a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning")

MODEL = ["config.json", "model.safetensors"]
CHECKPOINT = ["config.json", "extra.json", "extra.safetensors", "manifest.json", "model.json", "model.safetensors"]


class Run:
    """What a trainer does around the callback: saves, events, and its own files."""

    def __init__(self, output_dir, hub, *, delays=(0, 0), **options):
        self.output_dir = Path(output_dir)
        self.checkpointer = Checkpointer(output_dir, keep_last=options.pop("keep_last", None))
        self.repository = HubRepository(
            options.pop("repo_id", "run"),
            token=options.pop("token", TOKEN),
            endpoint=hub.endpoint,
            retry_delays_s=delays,
            private=options.pop("private", None),
            revision=options.pop("revision", None),
        )
        self.callback = HubCallback(self.repository, output_dir=output_dir, **options)
        self.state = SimpleNamespace(global_step=0, is_world_process_zero=True)
        self.fire("on_init_end")

    def fire(self, event, **context):
        assert getattr(self.callback, event)(None, self.state, None, **context) is None

    def save(self, step):
        self.state.global_step = step
        self.checkpointer.save(
            step,
            parts(step),
            write_extra=lambda folder: (folder / "config.json").write_text(json.dumps({"step": step})),
        )
        self.fire("on_save")

    def finish(self, **context):
        (self.output_dir / "README.md").write_text("# card")
        (self.output_dir / "model.safetensors").write_bytes(b"final")
        self.fire("on_train_end", **context)

    def settle(self):
        self.callback._queue.wait()


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
    run = Run(output_dir, hub, strategy=strategy)
    for step in (1, 2):
        run.save(step)
        run.settle()
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


def test_the_last_checkpoint_holds_no_file_of_an_older_one(hub, tmp_path):
    run = Run(tmp_path / "out", hub, strategy="checkpoint")
    run.state.global_step = 1
    run.checkpointer.save(1, {**parts(1), "scaler": parts(1)["extra"]})
    run.fire("on_save")
    run.settle()
    assert "last-checkpoint/scaler.json" in hub.files("ci/run")
    run.save(2)
    run.settle()
    assert "last-checkpoint/scaler.json" not in hub.files("ci/run")


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


@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        ("POST", "/commit/", {"status": 503}),
        ("POST", "/commit/", {"drop": True}),
        ("POST", "/repos/create", {"status": 502}),
        ("POST", "/commit/", {"status": 429}),
    ],
    ids=["503", "dropped", "create", "throttled"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_passing_fault_is_tried_again(method, path, fault, hub, tmp_path, caplog):
    run = Run(tmp_path / "out", hub)
    run.settle()
    run.repository._made = False
    hub.fail(method, path, times=2 if "drop" not in fault else 1, **fault)
    run.save(1)
    run.settle()
    assert hub.files("ci/run") == MODEL
    assert "trying again in 0 s" in caplog.text


def test_with_every_commit_failing_the_run_ends_normally_and_says_what_is_missing(hub, tmp_path, caplog):
    run = Run(tmp_path / "out", hub, strategy="checkpoint", always_push=True)
    run.settle()
    hub.fail("POST", "/commit/", status=500, times=10**6)
    run.save(1)
    run.settle()
    assert "'Training in progress, step 1' was not pushed to ci/run: HfHubHTTPError: " in caplog.text
    run.save(2)
    run.finish()
    [summary] = [record.message for record in caplog.records if record.message.startswith("not all of the run")]
    assert "step 1" in summary
    assert "step 2" in summary
    assert "End of training" in summary
    assert hub.titles("ci/run") == ["initial commit"]
    assert run.checkpointer.steps() == [1, 2]
    assert not list((tmp_path / "out").glob(".tmp-*"))


@pytest.mark.parametrize("status", [400, 403])
def test_a_request_that_is_at_fault_is_not_tried_again(status, hub, tmp_path, caplog):
    run = Run(tmp_path / "out", hub)
    run.settle()
    hub.fail("POST", "/commit/", status=status, times=9)
    run.save(1)
    run.settle()
    assert sum("/commit/" in path for _, path in hub.log) == 1
    assert "trying again" not in caplog.text


def test_a_dead_hub_harms_nothing(hub, tmp_path, caplog):
    hub.stop()
    run = Run(tmp_path / "out", hub)
    run.save(1)
    run.finish()
    assert "ci/run" not in hub.repositories
    assert "run could not be made: " in caplog.text
    assert "not all of the run is at" in caplog.text
    assert run.checkpointer.steps() == [1]


@pytest.mark.parametrize("token", ["hf_WRONGwrongWRONG", "hf_BROKEN\nbroken"])
def test_a_wrong_token_is_reported_before_the_first_save_and_is_in_no_message(token, hub, tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, logger="tr_ckpt"):
        run = Run(tmp_path / "out", hub, token=token)
        run.settle()
        assert "run could not be made: " in caplog.text
        with pytest.raises(PushError) as caught:
            run.callback.push_to_hub(tmp_path)
        run.finish()
    told = caplog.text + str(caught.value) + repr(run.repository) + repr(run.callback)
    assert token not in told
    assert token.splitlines()[0] not in told


def test_a_run_that_an_error_ended_is_not_pushed_as_finished(hub, tmp_path):
    run = Run(tmp_path / "out", hub)
    run.save(1)
    run.finish(error=RuntimeError("out of memory"))
    assert hub.titles("ci/run") == ["initial commit", "Training in progress, step 1"]


def test_a_run_without_files_of_its_own_ends_with_its_last_checkpoints_model(hub, tmp_path):
    run = Run(tmp_path / "out", hub, strategy="end")
    run.save(4)
    run.fire("on_train_end", error=None)
    assert hub.files("ci/run") == MODEL


def test_other_processes_push_nothing(hub, tmp_path):
    callback = HubCallback(HubRepository("run", token=TOKEN, endpoint=hub.endpoint), output_dir=tmp_path)
    other = SimpleNamespace(global_step=1, is_world_process_zero=False)
    for event in ("on_init_end", "on_save", "on_train_end"):
        getattr(callback, event)(None, other, None)
    callback._queue.wait()
    assert hub.log == []


@pytest.mark.parametrize("private", [None, True, False])
def test_the_repository_is_made_as_asked(private, hub, tmp_path):
    run = Run(tmp_path / "out", hub, private=private, repo_id="org/named", revision="exp/1")
    run.save(1)
    run.settle()
    assert hub.repositories["org/named"].private is bool(private)
    assert hub.files("org/named", "exp/1") == MODEL
    assert hub.files("org/named") == []


def test_a_repository_that_exists_is_used(hub, tmp_path):
    for step in (1, 2):
        run = Run(tmp_path / str(step), hub, revision="branch")
        run.save(step)
        run.settle()
    assert hub.titles("ci/run", "branch")[1:] == ["Training in progress, step 1", "Training in progress, step 2"]


def test_a_folder_can_be_pushed_on_demand(hub, tmp_path):
    run = Run(tmp_path / "out", hub)
    folder = tmp_path / "folder"
    (folder / "checkpoint-3").mkdir(parents=True)
    (folder / "sub").mkdir()
    for name in ("README.md", "sub/x.txt", "_no", "checkpoint-3/no"):
        (folder / name).write_text(name)
    url = run.callback.push_to_hub(folder, "My message")
    assert url.startswith(f"{hub.endpoint}/ci/run/commit/")
    assert hub.files("ci/run") == ["README.md", "sub/x.txt"]
    assert hub.titles("ci/run")[-1] == "My message"

    gate = hub.hold("POST", "/preupload/")
    future = run.callback.push_to_hub(folder, commit_message="Later", blocking=False)
    (folder / "README.md").write_text("changed since")
    gate.set()
    assert future.result(30).startswith(hub.endpoint)
    assert hub.read("ci/run", "README.md") == b"README.md"


def test_a_push_on_demand_that_fails_raises(hub, tmp_path):
    run = Run(tmp_path / "out", hub)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").touch()
    hub.fail("POST", "/commit/", status=403)
    with pytest.raises(PushError, match=r"'End of training' was not pushed to ci/run: .*injected fault"):
        run.callback.push_to_hub(tmp_path / "out")


def test_files_that_cannot_be_copied_are_a_failed_push_and_no_more(hub, tmp_path, caplog):
    run = Run(tmp_path / "out", hub)
    run.state.global_step = 7
    run.fire("on_save")  # of a checkpoint that is not there
    run.settle()
    assert "'Training in progress, step 7' was not pushed: its files could not be copied: " in caplog.text


def test_files_are_copied_where_there_are_no_links(hub, tmp_path, monkeypatch):
    from tr_ckpt import files

    def link(source, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(files, "link", link)
    run = Run(tmp_path / "out", hub, strategy="checkpoint")
    run.save(1)
    run.settle()
    assert "last-checkpoint/manifest.json" in hub.files("ci/run")


def test_an_unknown_strategy_is_refused(hub, tmp_path):
    message = "hub_strategy='each' is not known; give one of end, every_save, checkpoint, all_checkpoints"
    with pytest.raises(ValueError, match=message):
        HubCallback(HubRepository("run", token=TOKEN), output_dir=tmp_path, strategy="each")


def test_without_the_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"the Hub needs huggingface_hub; pip install 'tr-ckpt\[hub\]'"):
        HubRepository("run")


SCRIPT = """
import logging, sys
from types import SimpleNamespace
from ckpt_parts import parts
from tr_ckpt import Checkpointer, HubCallback
logging.basicConfig(level=logging.DEBUG)
out = sys.argv[1]
args = SimpleNamespace(output_dir=out, hub_model_id=None, hub_token=None, hub_private_repo=True, hub_revision=None,
                       hub_strategy=SimpleNamespace(value="checkpoint"), hub_always_push=True)
callback = HubCallback.from_arguments(args)
print(callback, callback.repository, vars(callback))
state = SimpleNamespace(global_step=1, is_world_process_zero=True)
callback.on_init_end(args, state, None)
Checkpointer(out).save(1, parts(1))
callback.on_save(args, state, None)
callback.on_train_end(args, state, None, error=None)

from huggingface_hub import snapshot_download
folder = snapshot_download("ci/my-run", allow_patterns="last-checkpoint/*")
into = parts()
print("restored", Checkpointer("elsewhere").restore(into, folder + "/last-checkpoint"), into["model"].number)
"""


def test_a_run_is_pushed_and_goes_on_from_the_hub_and_its_token_is_nowhere(hub, tmp_path):
    """In a process of its own, where the client is imported with the environment that a user would set."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output_dir = tmp_path / "my-run"
    done = subprocess.run(
        [sys.executable, str(script), str(output_dir)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "restored 1 1" in done.stdout
    assert hub.repositories["ci/my-run"].private
    assert "last-checkpoint/manifest.json" in hub.files("ci/my-run")
    assert hub.titles("ci/my-run")[-1] == "Training in progress, step 1"  # nothing new at the end: no commit
    assert TOKEN not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


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
