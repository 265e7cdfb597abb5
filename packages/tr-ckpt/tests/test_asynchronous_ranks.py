"""Several processes that save together in the background, without the communication of training."""

import signal

import ckpt_asynchronous_workers as workers
import pytest
from ckpt_parts import parts, restored
from ckpt_workers import exit_codes, run

from tr_ckpt import Checkpointer


def test_two_ranks_write_while_they_communicate(tmp_path):
    run(2, workers.save_and_train_on, str(tmp_path / "run"))
    kept = {path.name for path in (tmp_path / "run" / "checkpoint-5").iterdir()}
    assert {"rng-0.json", "rng-0.safetensors", "rng-1.json", "rng-1.safetensors", "model.json"} <= kept
    assert not [name for name in kept if name.startswith("rank-")]


@pytest.mark.parametrize("how", ["own", "full"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_on_one_rank_is_raised_once_on_all(failing, how, tmp_path):
    run(2, workers.fail_on_one, str(tmp_path / "run"), failing, how)


def test_a_rank_that_takes_too_long_is_given_up(tmp_path):
    run(2, workers.rank_1_takes_too_long, str(tmp_path / "run"))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_noticed_and_nothing_is_lost(killed, tmp_path):
    codes = exit_codes(workers.one_is_killed, str(tmp_path / "run"), killed)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 0
    assert restored(tmp_path / "run") == (1, 10)
    Checkpointer(tmp_path / "run").save(3, parts(30))
    assert not list((tmp_path / "run").glob(".tmp-*"))
