"""Arguments in one of several processes."""

import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from tr_args import ParallelMode, TrainingArguments, main_process_first
from tr_args.main_process_first import first

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def place(monkeypatch, rank, local_rank, world_size=4, local_world_size=2):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name, value in zip(names, (rank, local_rank, world_size, local_world_size), strict=True):
        monkeypatch.setenv(name, str(value))


# Two machines with two processes each: what every process's level is.
PLACES = [(0, 0), (1, 1), (2, 0), (3, 1)]


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        ({}, ["info", "warning", "info", "warning"]),
        ({"log_level": "warning", "log_level_replica": "error"}, ["warning", "error", "warning", "error"]),
        (
            {"log_level": "warning", "log_level_replica": "error", "log_on_each_node": False},
            ["warning", "error", "error", "error"],
        ),
        ({"log_level": "error", "log_level_replica": "error", "log_on_each_node": False}, ["error"] * 4),
        ({"log_level_replica": "passive"}, ["info", "warning", "info", "warning"]),
    ],
)
def test_every_process_of_two_machines_has_the_documented_level(monkeypatch, values, levels):
    seen = []
    for rank, local_rank in PLACES:
        place(monkeypatch, rank, local_rank)
        seen.append(TrainingArguments(**values).get_process_log_level())
    assert seen == [LEVELS[level] for level in levels]


def test_who_saves_depends_on_whether_machines_share_their_files(monkeypatch):
    saves = {False: [], True: []}
    for rank, local_rank in PLACES:
        place(monkeypatch, rank, local_rank)
        for each in saves:
            saves[each].append(TrainingArguments(save_on_each_node=each).should_save)
    assert saves == {False: [True, False, False, False], True: [True, False, True, False]}


def test_a_process_without_a_launcher_is_alone():
    args = TrainingArguments(ddp_timeout=60)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert (args.should_log, args.should_save, args.place_model_on_device) == (True, True, True)
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert args.ddp_timeout_delta == timedelta(seconds=60)


def test_what_an_old_launcher_passes_as_local_rank_counts_without_the_variable(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert TrainingArguments(local_rank=1).local_process_index == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert TrainingArguments(local_rank=1).local_process_index == 0


def test_bound_values_go_before_the_launcher_s(monkeypatch):
    place(monkeypatch, 3, 1)
    args = TrainingArguments().bind(rank=1, local_rank=1, world_size=2)
    assert (args.process_index, args.local_process_index, args.world_size) == (1, 1, 2)
    assert args.parallel_mode is ParallelMode.DISTRIBUTED
    assert "device" not in args.to_dict()


def test_a_bound_device_is_the_device():
    class Device:
        type = "xla"

    args = TrainingArguments().bind(device=Device())
    assert (args.device.type, args.n_gpu) == ("xla", 1)
    assert args.parallel_mode is ParallelMode.TPU


def test_an_unbound_device_is_looked_for_when_it_is_read():
    torch = pytest.importorskip("torch")
    args = TrainingArguments(use_cpu=True)
    assert (args.device, args.n_gpu) == (torch.device("cpu"), 0)
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        assert TrainingArguments().device == torch.device("cpu")


# --- one process first ---------------------------------------------------------------------------------------------


@pytest.fixture
def together(tmp_path):
    """Run the script beside this file as three processes and return what each printed."""

    def run(behaviour):
        command = [sys.executable, str(Path(__file__).with_name("cook_together.py")), str(tmp_path), behaviour]
        shared = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "TMPDIR": str(tmp_path)}
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        try:
            return [process.communicate(timeout=60)[0].strip() for process in processes]
        finally:
            for process in processes:
                process.kill()

    return run


def test_the_others_begin_when_the_main_process_is_done(together, tmp_path):
    assert together("cook") == ["done"] * 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_others_hear_of_the_main_process_s_failure(together):
    main, *others = together("fail")
    assert main == "KeyError: 'no salt'"
    assert others == ["RuntimeError: the main process failed in 'cooking': KeyError: 'no salt'"] * 2


def test_the_others_do_not_wait_for_ever(together):
    main, *others = together("absent")
    assert main == "done"
    assert all(other.startswith("TimeoutError: process ") and "waited 1 s" in other for other in others)


def test_the_main_process_does_not_wait_for_ever(tmp_path):
    waiting = first(0, 2, timeout_s=0.1, desc="cooking", shared=tmp_path)
    with pytest.raises(TimeoutError, match=r"processes \[1\] did not come within 0.1 s"), waiting:
        pass


def test_one_process_alone_waits_for_nobody(tmp_path):
    with TrainingArguments(str(tmp_path)).main_process_first():
        assert list(tmp_path.iterdir()) == []


def test_what_a_broken_run_left_behind_is_not_mistaken_for_an_answer(tmp_path, monkeypatch):
    import itertools

    from tr_args import main_process_first as module

    calls = iter([0, 0, 1])
    monkeypatch.setattr(module, "_calls", itertools.count())
    folder = module._place(0, tmp_path)
    for name in ("want-1", "done-1-old", "seen-1-old"):
        (folder / name).write_text('{"failure": ""}' if name.startswith("done") else "old")
    monkeypatch.setattr(module, "_calls", calls)
    happened = []

    def other():
        with first(1, 2, timeout_s=20, desc="cooking", shared=tmp_path):
            happened.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.2)
    assert happened == []
    with first(0, 2, timeout_s=20, desc="cooking", shared=tmp_path):
        happened.append("main")
    thread.join(timeout=20)
    assert happened == ["main", "other"]


def test_split_batches_divides_the_given_sizes_among_the_processes(monkeypatch):
    place(monkeypatch, 0, 0)
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 12}
    whole = TrainingArguments(**sizes)
    split = TrainingArguments(**sizes, accelerator_config={"split_batches": True})
    assert (whole.train_batch_size, whole.eval_batch_size) == (8, 12)
    assert (split.train_batch_size, split.eval_batch_size) == (2, 3)
    assert split.bind(world_size=2).train_batch_size == 4


def trap(kind, folder, elsewhere):
    if kind == "link":
        folder.symlink_to(elsewhere)
    elif kind == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "open" else 0o700)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="users as POSIX has them")
@pytest.mark.parametrize(
    ("kind", "problem"),
    [("link", "it is a link"), ("file", "not a folder"), ("open", "others may write"), ("foreign", "belongs to user")],
)
def test_processes_do_not_meet_in_a_folder_that_somebody_else_made(tmp_path, monkeypatch, kind, problem):
    """In a folder where all may write, the name of the meeting can be guessed and taken."""
    shared, elsewhere = tmp_path / "tmp", tmp_path / "elsewhere"
    shared.mkdir()
    shared.chmod(0o1777)
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    call = next(main_process_first._calls) + 1
    folder = main_process_first._place(call, None)
    folder.rmdir()
    trap(kind, folder, elsewhere)
    if kind == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for rank in (0, 1):
        monkeypatch.setattr(main_process_first, "_calls", iter([call]))
        with pytest.raises(RuntimeError, match=problem), first(rank, 2, timeout_s=5, desc="work"):
            pytest.fail("the body was run")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="users as POSIX has them")
def test_processes_meet_in_a_folder_of_their_own_that_an_earlier_run_left(tmp_path, monkeypatch):
    tmp_path.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main_process_first._place(7, None) == main_process_first._place(7, None)
    assert main_process_first._place(7, None).stat().st_mode & 0o777 == 0o700


class State:
    """Stands for accelerate's, which all its objects share."""

    def __init__(self, cpu):
        self._shared_state["cpu"] = cpu


@pytest.fixture
def accelerate(monkeypatch):
    """Put accelerate's logger in place, as if it were imported, outside a launch."""
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(State, "_shared_state", {}, raising=False)
    monkeypatch.setitem(sys.modules, "accelerate.logging", SimpleNamespace(PartialState=State))


def test_the_state_of_accelerate_is_there_once_there_are_arguments(accelerate):
    @dataclass
    class Logging(TrainingArguments):
        def __post_init__(self):
            super().__post_init__()
            self.seen = dict(State._shared_state)

    assert Logging("out", use_cpu=True).seen == {"cpu": True}
    TrainingArguments("out", use_cpu=False)
    assert State._shared_state == {"cpu": True}  # whoever made it


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
    ],
)
def test_in_a_launch_arguments_make_no_state_of_accelerate(accelerate, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    TrainingArguments("out", use_cpu=True).check()
    assert State._shared_state == {}


def test_on_xla_arguments_do_not_take_the_device_before_the_strategy(accelerate, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace())
    TrainingArguments("out", use_cpu=True)
    assert State._shared_state == {}


def test_without_accelerate_there_is_no_state(monkeypatch):
    monkeypatch.delitem(sys.modules, "accelerate.logging", raising=False)
    TrainingArguments("out")
    assert "accelerate.logging" not in sys.modules
