import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tr_log import EventsFile, get_logger
from tr_log.events_file import _modified
from tr_log.phases import phase, phase_clock


def run_of(folder, step=0, max_steps=4, is_main=True):
    args = SimpleNamespace(output_dir=str(folder), learning_rate=0.1, hub_token="secret")
    return args, SimpleNamespace(global_step=step, max_steps=max_steps, is_world_process_zero=is_main)


def read(folder, name="events.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def kinds(folder):
    return [event["event"] for event in read(folder) if event["event"] != "time"]


def test_a_run_leaves_its_start_its_marks_and_its_end(tmp_path):
    args, state = run_of(tmp_path)
    file = EventsFile.from_arguments(args)
    file.on_train_begin(args, state, None)
    state.global_step = 2
    file.on_evaluate(args, state, None)
    file.on_save(args, state, None)
    state.global_step = 4
    file.on_train_end(args, state, None)
    assert kinds(tmp_path) == ["start", "evaluation", "checkpoint", "end"]
    start, end = read(tmp_path)[0], read(tmp_path)[-1]
    assert (start["step"], start["max_steps"], start["pid"]) == (0, 4, os.getpid())
    assert start["arguments"] == {"output_dir": str(tmp_path), "learning_rate": 0.1}  # and no token
    assert sys.argv[0] == start["script"]
    assert not set(sys.argv[1:]) & set(map(str, start.values()))
    assert start["versions"]["python"]
    assert start["hardware"]["cores"]
    assert (end["step"], end["status"]) == (4, "finished")


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("too hot"), "failed"), (KeyboardInterrupt(), "stopped"), (None, "stopped")],
)
def test_the_end_says_how_it_ended(tmp_path, error, status):
    args, state = run_of(tmp_path)
    file = EventsFile()
    file.on_train_begin(args, state, None)
    file.on_train_end(args, state, None, error=error)
    end = read(tmp_path)[-1]
    assert end["status"] == status
    assert end.get("error", "") == ("" if error is None else f"{type(error).__name__}: {error}")


def test_phases_are_written_when_they_are_due_and_at_a_save(tmp_path, monkeypatch):
    args, state = run_of(tmp_path)
    file = EventsFile()
    with phase_clock() as clock:
        file.on_train_begin(args, state, None)
        assert clock.phase == "compute"
        assert clock.due_s > time.perf_counter()
        with phase("evaluation"):
            pass
        state.global_step = 1
        file.on_log(args, state, None)  # not due
        clock.on_due(state.global_step)
        file.on_save(args, state, None)
        file.on_train_end(args, state, None)
        assert clock.due_s == float("inf")
    times = [event for event in read(tmp_path) if event["event"] == "time"]
    assert [event["step"] for event in times] == [0, 1, 1, 1]
    assert set(times[1]["phases"]) == {"compute", "evaluation"}
    assert read(tmp_path)[0]["time_s"] <= times[0]["time_s"]


def test_times_say_whether_exchange_has_that_of_gradients(tmp_path):
    args, state = run_of(tmp_path)
    file = EventsFile()
    with phase_clock() as clock:
        file.on_train_begin(args, state, None)
        clock.exchanged_s = lambda: 0.0
        file.on_train_end(args, state, None)
    times = [event for event in read(tmp_path) if event["event"] == "time"]
    assert [event.get("measures_exchange") for event in times] == [None, True]


def test_rates_are_written_once_when_they_are_new_and_those_of_the_end_too(tmp_path):
    args, state = run_of(tmp_path)
    file = EventsFile()
    with phase_clock() as clock:
        file.on_train_begin(args, state, None)
        file.on_log(args, state, None)  # no rates are known
        state.global_step, clock.rates = 1, {"samples_per_second": 1234.56789, "memory_bytes": 2**30}
        file.on_log(args, state, None)
        file.on_log(args, state, None)  # that of an evaluation
        state.global_step, clock.rates = 2, {"samples_per_second": 7.0}
        file.on_train_end(args, state, None)
    rates = [event for event in read(tmp_path) if event["event"] == "rates"]
    assert [event["step"] for event in rates] == [1, 2]
    assert rates[0]["samples_per_second"] == 1234.57
    assert rates[0]["memory_bytes"] == 2**30
    assert "memory_bytes" not in rates[1]


def test_a_resumed_run_appends_and_a_new_one_keeps_the_old_file(tmp_path):
    for step in (0, 2):
        args, state = run_of(tmp_path, step)
        file = EventsFile()
        file.on_train_begin(args, state, None)
        file.on_train_end(args, state, None)
    assert kinds(tmp_path) == ["start", "end", "start", "end"]
    file = EventsFile()
    file.on_train_begin(*run_of(tmp_path), None)
    assert kinds(tmp_path) == ["start"]
    file.on_train_end(*run_of(tmp_path), None)
    assert len(read(tmp_path, "events-1.jsonl")) == 8


def test_warnings_of_the_run_are_events_and_others_are_not(tmp_path):
    args, state = run_of(tmp_path)
    file = EventsFile()
    get_logger("tr_log.test").warning("before")
    file.on_train_begin(args, state, None)
    get_logger("tr_log.test").warning("a rate of %g", 7.0)
    get_logger("tr_log.test").info("of no concern")
    logging.getLogger("elsewhere").warning("of another library")
    file.on_train_end(args, state, None)
    get_logger("tr_log.test").warning("after")
    assert [e["text"] for e in read(tmp_path) if e["event"] == "warning"] == ["a rate of 7"]


def test_other_processes_write_nothing(tmp_path):
    args, state = run_of(tmp_path, is_main=False)
    file = EventsFile()
    for event in (file.on_train_begin, file.on_save, file.on_evaluate, file.on_log, file.on_train_end):
        event(args, state, None)
    assert not list(tmp_path.iterdir())


def test_a_secret_among_the_arguments_is_not_written(tmp_path):
    args, state = run_of(tmp_path)
    args.api_key, args.password = "0123456789", "abcdefghij"
    file = EventsFile()
    file.on_train_begin(args, state, None)
    file.on_train_end(args, state, None)
    text = (tmp_path / "events.jsonl").read_text()
    assert "0123456789" not in text
    assert "abcdefghij" not in text


def test_a_secret_in_an_error_or_a_warning_is_masked(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    args, state = run_of(tmp_path)
    args.hub_token = "hidden-token"
    file = EventsFile()
    file.on_train_begin(args, state, None)
    get_logger("tr_log.test").warning("no push to http://me:word@hub/x with hidden-token")
    file.on_train_end(args, state, None, error=OSError("refused: 0123456789abcdef"))
    assert [e["text"] for e in read(tmp_path) if e["event"] == "warning"] == ["no push to http://***@hub/x with ***"]
    assert read(tmp_path)[-1]["error"] == "OSError: refused: ***"


def test_a_callback_that_was_removed_during_the_run_stops_with_it(tmp_path):
    args, state = run_of(tmp_path)
    file = EventsFile()
    before = list(logging.getLogger("tr_log").handlers)
    with phase_clock():
        file.on_train_begin(args, state, None)
        assert logging.getLogger("tr_log").handlers != before
    assert logging.getLogger("tr_log").handlers == before
    get_logger("tr_log.test").warning("after")
    assert kinds(tmp_path) == ["start"]


class NoTruth:
    def __eq__(self, other):
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None


def never():
    raise AssertionError("a factory of the user's was called")


@dataclasses.dataclass
class OwnArguments:
    output_dir: str
    values: NoTruth = dataclasses.field(default=None)
    made: list = dataclasses.field(default_factory=never)
    plain: list = dataclasses.field(default_factory=list)


OwnArguments.__dataclass_fields__["values"].default = NoTruth()


def test_arguments_of_a_kind_of_their_own_do_not_end_a_run(tmp_path):
    args = OwnArguments(str(tmp_path), NoTruth(), [], [])
    file = EventsFile()
    file.on_train_begin(args, run_of(tmp_path)[1], None)
    file.on_train_end(args, run_of(tmp_path)[1], None)
    assert read(tmp_path)[0]["changed"] == ["made", "output_dir", "values"]


def test_describing_a_run_starts_no_accelerator(tmp_path, monkeypatch):
    asked = []
    cuda = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: False, get_device_name=asked.append, device_count=lambda: 1
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    file = EventsFile()
    file.on_train_begin(*run_of(tmp_path), None)
    file.on_train_end(*run_of(tmp_path), None)
    assert asked == []


def test_a_start_tells_the_command_without_its_secrets_the_model_the_data_and_the_commit(tmp_path, monkeypatch):
    repository, commit = tmp_path / "repository", "0123456789" * 4
    (repository / ".git/refs/heads").mkdir(parents=True)
    (repository / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (repository / ".git/refs/heads/main").write_text(commit + "\n")
    words = [f"{repository}/train.py", "--seed", "1", "--hub_token", "topsecret", "--api_key=topsecret", "a b"]
    monkeypatch.setattr(sys, "argv", words)
    parameters = [
        SimpleNamespace(numel=lambda: 4, requires_grad=False),
        SimpleNamespace(numel=lambda: 0, ds_numel=6, requires_grad=True),  # other ranks hold it, under DeepSpeed
        SimpleNamespace(numel=lambda: 4, quant_state=SimpleNamespace(shape=(2, 4)), requires_grad=False),  # in 4 bits
    ]
    model = SimpleNamespace(parameters=lambda: parameters, config=SimpleNamespace(_name_or_path="some/net"))
    file = EventsFile()
    file.on_train_begin(*run_of(tmp_path), None, model=model, train_dataloader=SimpleNamespace(dataset=[0] * 7))
    start = read(tmp_path)[0]
    assert start["command"] == f"{repository}/train.py --seed 1 --hub_token '***' '--api_key=***' 'a b'"
    assert start["model"] == {"class": "SimpleNamespace", "source": "some/net", "parameters": 18, "trained": 6}
    assert (start["train_samples"], start["commit"]) == (7, commit)
    (repository / ".git/refs/heads/main").unlink()  # as `git gc` does
    (repository / ".git/packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    (tmp_path / "second").mkdir()
    (tmp_path / "second/.git").write_text(f"gitdir: {repository}/.git/worktrees/second\n")
    (repository / ".git/worktrees/second").mkdir(parents=True)
    (repository / ".git/worktrees/second/HEAD").write_text("ref: refs/heads/main\n")
    (repository / ".git/worktrees/second/commondir").write_text("../..\n")
    monkeypatch.setattr(sys, "argv", [f"{tmp_path}/second/train.py"])
    EventsFile().on_train_begin(*run_of(tmp_path), None)
    assert read(tmp_path)[0]["commit"] == commit
    assert read(tmp_path)[0]["model"] == {}


def test_a_start_tells_how_many_files_differ_from_the_commit(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("train.py", "net.py"):
        (repository / name).write_text("1")
    user = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for words in (["init", "-q"], ["add", "."], [*user, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(repository), *words], check=True)
    monkeypatch.setattr(sys, "argv", [f"{repository}/train.py"])
    for text, untracked, expected in (("1", "out", 0), ("2", "out", 1)):
        (repository / "net.py").write_text(text)
        (repository / untracked).write_text("")
        _modified.cache_clear()
        EventsFile().on_train_begin(*run_of(tmp_path / f"run{expected}"), None)
        assert read(tmp_path / f"run{expected}")[0]["modified"] == expected
    _modified.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    EventsFile().on_train_begin(*run_of(tmp_path / "run2"), None)
    assert read(tmp_path / "run2")[0]["modified"] is None


def test_a_prediction_is_an_event_also_after_the_end(tmp_path):
    args, state = run_of(tmp_path)
    file = EventsFile()
    file.on_predict(args, state, None, metrics={"test_loss": 1.0})
    assert not list(tmp_path.iterdir())  # no run is known yet
    file.on_train_begin(args, state, None)
    file.on_train_end(args, state, None)
    file.on_predict(args, state, None, metrics={"test_loss": 0.5, "test_words": "many"})
    assert kinds(tmp_path) == ["start", "end", "prediction"]
    assert read(tmp_path)[-1]["metrics"] == {"test_loss": 0.5}


def test_updates_that_were_not_made_are_an_event_at_the_next_log(tmp_path):
    args, state = run_of(tmp_path)
    file = EventsFile()
    with phase_clock() as clock:
        file.on_train_begin(args, state, None)
        clock.updates = {"skipped": 2}
        for state.global_step in (5, 6):
            file.on_log(args, state, None)
        file.on_train_end(args, state, None)
    known = [event for event in read(tmp_path) if event["event"] == "updates"]
    assert [(event["step"], event["skipped"]) for event in known] == [(5, 2)]


def test_where_arguments_were_set_is_written_if_they_know_it(tmp_path):
    @dataclass
    class Args:
        output_dir: str = str(tmp_path)
        seed: int = 1
        rate: float = 0.1

        def origin(self, name):
            return {"seed": "file a.yaml", "rate": "command line"}.get(name, "default")

    _, state = run_of(tmp_path)
    EventsFile().on_train_begin(Args(), state, None)
    assert read(tmp_path)[0]["origins"] == {"seed": "file a.yaml", "rate": "command line"}
