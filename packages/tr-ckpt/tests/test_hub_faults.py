"""Pushes while the Hub, or the way to it, is at fault."""

import json
import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import pytest
from ckpt_hub import Run
from minihub import READ_TOKEN, wait_until

from tr_ckpt import PushError
from tr_ckpt.hub import hub_callback

pytestmark = [
    # The client's own way of sending a file, and of saying that it tries again.
    pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

REQUESTS = {
    "create": ("POST", "/repos/create"),
    "head": ("GET", "/api/models/ci/run"),
    "tree": ("GET", "/tree/"),
    "preupload": ("POST", "/preupload/"),
    "batch": ("POST", "/objects/batch"),
    "upload": ("PUT", "/_upload/"),
    "verify": ("POST", "/_verify/"),
    "commit": ("POST", "/commit/"),
}


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    """Return what the client and the pushes slept, in place of sleeping."""
    slept = SimpleNamespace(client=[], pushes=[])
    module = pytest.importorskip("huggingface_hub.utils._http")
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=slept.client.append))
    monkeypatch.setattr("tr_ckpt.hub.retrying.time", SimpleNamespace(sleep=slept.pushes.append))
    return slept


def save_twice(run):
    """Save, push and finish; a second save makes the mirror of the last checkpoint delete a file."""
    run.push(1, scaler=run.parts(1)["extra"])
    run.push(2)
    run.finish()


def assert_all_is_there(hub, run, caplog):
    titles = ["initial commit", "Training in progress, step 1", "Training in progress, step 2", "End of training"]
    assert hub.titles("ci/run") == titles
    assert json.loads(hub.read("ci/run", "last-checkpoint/config.json")) == {"step": 2}
    assert "last-checkpoint/scaler.json" not in hub.files("ci/run")
    assert hub.read("ci/run", "model.safetensors") == b"final"
    assert "the run is pushed to" in caplog.text
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert not list(run.output_dir.glob(".tmp-*"))


@pytest.mark.parametrize("request_", REQUESTS)
def test_an_answer_of_500_to_any_request_is_tried_again(request_, hub, tmp_path, caplog):
    caplog.set_level("INFO")
    hub.fail(*REQUESTS[request_], status=500, times=2)
    run = Run(tmp_path / "out", hub, strategy="checkpoint")
    save_twice(run)
    assert not any(fault["times"] for fault in hub._faults)  # they came
    assert_all_is_there(hub, run, caplog)


@pytest.mark.parametrize("when", ["before", "after", "unanswered", "answer"])
@pytest.mark.parametrize("request_", REQUESTS)
def test_a_connection_that_is_dropped_is_tried_again(request_, when, hub, tmp_path, caplog):
    """Also when the Hub did what it was asked and only the answer is missing: nothing is committed twice."""
    caplog.set_level("INFO")
    run = Run(tmp_path / "out", hub, strategy="checkpoint") if request_ != "create" else None
    hub.fail(*REQUESTS[request_], drop=when)
    run = run or Run(tmp_path / "out", hub, strategy="checkpoint")
    save_twice(run)
    assert not any(fault["times"] for fault in hub._faults)
    assert_all_is_there(hub, run, caplog)


def test_somebody_elses_commit_in_between_is_kept(hub, tmp_path, caplog):
    run = Run(tmp_path / "out", hub)
    run.settle()
    gate = hub.hold("POST", "/commit/")
    run.save(1)
    wait_until(lambda: any("/commit/" in path for _, path in hub.log))
    hub.replace("ci/run", "notes.txt", b"mine")
    gate.set()
    run.settle()
    assert hub.titles("ci/run")[1:] == ["Somebody else's change of notes.txt", "Training in progress, step 1"]
    assert "412" in caplog.text
    assert hub.read("ci/run", "notes.txt") == b"mine"


def in_a_minute():
    return format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)


@pytest.mark.parametrize(
    ("headers", "least", "most"),
    [
        ({"Retry-After": "37"}, 37, 37),
        ({"Retry-After": in_a_minute}, 50, 60),
        ({"ratelimit": '"api";r=0;t=55'}, 55, 55),
        ({"ratelimit": '"api";r=7;t=55'}, 0, 0),
        ({"Retry-After": "soon"}, 0, 0),
        ({"Retry-After": "0"}, 0, 0),
        ({}, 0, 0),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_the_hub_says_how_long_to_wait(headers, least, most, status, hub, tmp_path, without_waiting, caplog):
    run = Run(tmp_path / "out", hub)
    run.settle()
    asked = {name: value() if callable(value) else value for name, value in headers.items()}
    hub.fail("POST", "/commit/", status=status, headers=asked)
    run.push(1)
    [waited] = without_waiting.pushes
    assert least <= waited <= most
    assert "trying again in" in caplog.text
    assert "Training in progress, step 1" in hub.titles("ci/run")


def test_a_hub_that_asks_for_hours_is_not_waited_for(hub, tmp_path, without_waiting, caplog):
    run = Run(tmp_path / "out", hub)
    run.settle()
    hub.fail("POST", "/commit/", status=429, headers={"Retry-After": "7200"})
    run.push(1)
    assert without_waiting.pushes == []
    assert "and asks to wait 7200 s" in caplog.text
    run.push(2)
    assert hub.titles("ci/run")[1:] == ["Training in progress, step 2"]


def test_a_hub_that_comes_back_gets_what_it_missed(hub, tmp_path, caplog):
    """Every checkpoint whose push failed and that is still there goes with the next push."""
    run = Run(tmp_path / "out", hub, strategy="all_checkpoints", keep_last=2)
    run.settle()
    for method in ("GET", "POST", "PUT"):
        hub.fail(method, ".", drop="before", times=10**6)
    for step in (1, 2, 3):
        run.push(step)
    hub.heal()
    run.push(4)
    held = {name.split("/")[0] for name in hub.files("ci/run") if "/" in name}
    # Step 2 was removed from the disk as the fourth was saved; its push was still possible.
    assert held == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}
    for step in (2, 3, 4):
        assert json.loads(hub.read("ci/run", f"checkpoint-{step}/config.json")) == {"step": step}
    assert hub.titles("ci/run")[1:] == ["Training in progress, step 4"]
    caplog.clear()
    run.finish()
    [record] = [record for record in caplog.records if "is pushed to" in record.message]
    assert record.levelname == "WARNING"
    missed = ", ".join(f"'Training in progress, step {step}'" for step in (1, 2, 3))
    assert f"the run is pushed to {hub.endpoint}/ci/run, but later than planned: {missed}; last: " in record.message


def test_a_hub_that_comes_back_at_the_end_gets_the_whole_run(hub, tmp_path):
    run = Run(tmp_path / "out", hub, strategy="checkpoint")
    run.settle()
    hub.fail("POST", "/commit/", times=10**6)
    for step in (1, 2):
        run.push(step)
    hub.heal()
    run.finish()
    assert json.loads(hub.read("ci/run", "last-checkpoint/config.json")) == {"step": 2}
    assert hub.titles("ci/run")[1:] == ["End of training"]


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_the_last_save_is_pushed_at_the_end_where_it_was_left_out(strategy, error, hub, tmp_path):
    run = Run(tmp_path / "out", hub, strategy=strategy)
    gate = hub.hold("POST", "/preupload/")
    run.save(1)
    run.save(2)
    gate.set()
    run.fire("on_train_end", error=error)
    last = "Training in progress, step 2" if error else "End of training"
    assert hub.titles("ci/run")[1:] == ["Training in progress, step 1", last]
    assert json.loads(hub.read("ci/run", "config.json")) == {"step": 2}
    folder = {"checkpoint": "last-checkpoint", "all_checkpoints": "checkpoint-2"}.get(strategy)
    if folder:
        assert json.loads(hub.read("ci/run", f"{folder}/config.json")) == {"step": 2}


def test_pushes_that_wait_are_few_and_their_copies_go(hub, tmp_path, caplog):
    run = Run(tmp_path / "out", hub, strategy="all_checkpoints", always_push=True, keep_last=1)
    run.settle()  # or what is pushed first is still at work, and step 1 waits
    gate = hub.hold("POST", "/preupload/")
    for step in range(1, 8):
        run.save(step)
        assert 1 <= len(list(run.output_dir.glob(".tmp-pushing-*"))) <= 1 + hub_callback.MOST_WAITING
    assert "'Training in progress, step 2' was not pushed: 3 newer ones wait" in caplog.text
    gate.set()
    run.finish()
    assert hub.titles("ci/run")[1:] == [
        *(f"Training in progress, step {step}" for step in (1, 5, 6, 7)), "End of training"
    ]  # fmt: skip
    assert not list(run.output_dir.glob(".tmp-*"))


def test_the_summary_names_every_commit_and_says_how_to_push_later(hub, tmp_path, caplog):
    run = Run(tmp_path / "a run", hub, strategy="checkpoint", always_push=True, repo_id="ci/run", revision="exp")
    run.settle()
    hub.fail("POST", "/commit/", status=500, times=10**6)
    run.push(1)
    assert "'Training in progress, step 1' was not pushed to ci/run: HfHubHTTPError: " in caplog.text  # at once
    run.save(2)
    caplog.clear()
    run.finish()
    [summary] = [record.message for record in caplog.records if record.message.startswith("not all of the run")]
    names = ["Training in progress, step 1", "Training in progress, step 2", "End of training"]
    assert f"is at {hub.endpoint}/ci/run; not pushed: {', '.join(map(repr, names))}; last: 'End of training'" in summary
    folder = re.escape(str(run.output_dir))
    assert re.search(
        rf"Everything is in {folder}: push it later with trainer.push_to_hub\(\), or with: hf upload ci/run '{folder}' "
        rf"\. --revision exp --exclude '\.\*' '_\*' .*'wandb/\*' .*'checkpoint-\*' '\*/\.\*' .*'\*/checkpoint-\*' "
        rf"&& hf upload ci/run '{folder}/checkpoint-2' last-checkpoint --revision exp$",
        summary,
    )
    assert hub.titles("ci/run") == ["initial commit"]
    assert run.checkpointer.steps() == [1, 2]
    assert not list(run.output_dir.glob(".tmp-*"))
    hub.heal()
    run.callback.push_to_hub(run.output_dir)  # brings the checkpoint too
    assert json.loads(hub.read("ci/run", "last-checkpoint/config.json", "exp")) == {"step": 2}


@pytest.mark.parametrize("token", ["hf_WRONGwrongWRONG", READ_TOKEN])
def test_a_token_that_may_not_write_is_an_error_before_training(token, hub, tmp_path):
    run = Run(tmp_path / "out", hub, token=token)
    message = "run could not be made .* nothing could be pushed; give a token that may write there as hub_token or"
    with pytest.raises(PushError, match=message):
        run.fire("on_train_begin")


def test_a_repository_that_exists_is_no_error_for_a_token_that_may_only_read_it(hub, tmp_path, caplog):
    """Whether it may write there shows at the first push: asking does not tell."""
    Run(tmp_path / "first", hub).settle()
    run = Run(tmp_path / "out", hub, token=READ_TOKEN, repo_id="ci/run")
    run.fire("on_train_begin")
    run.push(1)
    assert "This token may not write" in caplog.text


@pytest.mark.parametrize("fault", [{"status": 500}, {"drop": "before"}])
def test_a_hub_at_fault_keeps_nobody_from_training(fault, hub, tmp_path):
    hub.fail("POST", "/repos/create", times=10**6, **fault)
    run = Run(tmp_path / "out", hub)
    run.fire("on_train_begin")
    hub.heal()
    run.settle()
    run.push(1)
    assert hub.titles("ci/run")[1:] == ["Training in progress, step 1"]


def test_a_hub_that_does_not_answer_keeps_nobody_from_training(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_callback, "REFUSAL_WITHIN_S", 0.01)
    gate = hub.hold("POST", "/repos/create")
    run = Run(tmp_path / "out", hub)
    run.fire("on_train_begin")
    gate.set()
    run.settle()
