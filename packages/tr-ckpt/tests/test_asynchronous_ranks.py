"""Several processes that save together in the background, without the communication of training."""

import multiprocessing
import signal
import time

import ckpt_asynchronous_workers as workers
import pytest
import torch.multiprocessing
from ckpt_parts import parts, restored

from tr_ckpt import Checkpointer

TIME_LIMIT_S = 120


def run_two(work, tmp_path, *arguments):
    started = torch.multiprocessing.start_processes(
        work,
        (2, str(tmp_path / "rendezvous"), str(tmp_path / "run"), *arguments),
        nprocs=2,
        join=False,
        start_method="forkserver",
    )
    deadline = time.monotonic() + TIME_LIMIT_S
    while not started.join(timeout=1):
        if time.monotonic() > deadline:
            for process in started.processes:
                process.kill()
            pytest.fail(f"the ranks did not end within {TIME_LIMIT_S} s")


def test_two_ranks_write_while_they_communicate(tmp_path):
    run_two(workers.save_and_train_on, tmp_path)
    kept = {path.name for path in (tmp_path / "run" / "checkpoint-5").iterdir()}
    assert {"rng-0.json", "rng-0.safetensors", "rng-1.json", "rng-1.safetensors", "model.json"} <= kept
    assert not [name for name in kept if name.startswith("rank-")]


def test_a_rank_that_is_done_first_sees_the_checkpoint_only_when_it_is_there(tmp_path):
    run_two(workers.another_rank_is_slow, tmp_path)


@pytest.mark.parametrize("how", ["own", "full"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_on_one_rank_is_raised_once_on_all(failing, how, tmp_path):
    run_two(workers.fail_on_one, tmp_path, failing, how)


def test_a_rank_that_takes_too_long_is_given_up(tmp_path):
    run_two(workers.rank_1_takes_too_long, tmp_path)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_noticed_and_nothing_is_lost(killed, tmp_path):
    context = multiprocessing.get_context("forkserver")
    arguments = (2, str(tmp_path / "rendezvous"), str(tmp_path / "run"), killed)
    ranks = [context.Process(target=workers.one_is_killed, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIME_LIMIT_S)
    codes = [process.exitcode for process in ranks]
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 0
    assert restored(tmp_path / "run") == (1, 10)
    Checkpointer(tmp_path / "run").save(3, parts(30))
    assert not list((tmp_path / "run").glob(".tmp-*"))
