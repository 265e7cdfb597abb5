import multiprocessing.util
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tr_dist.testing import RankError, run_ranks


class OddError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def _identify(value):
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.get_num_threads(), value


def _fail(rank, kind):
    if int(os.environ["RANK"]) != rank:
        return "well"
    if kind == "value":
        raise ValueError("broken here")
    if kind == "odd":
        raise OddError(1, 2)
    if kind == "exit":
        raise SystemExit(3)
    if kind == "lambda":
        return lambda: None
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return None


def _load_with_workers():
    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, num_workers=1)
    return os.environ["SEEN_BY_RANKS"], [batch.tolist() for batch in loader]


def test_ranks_have_the_callers_variables_and_may_start_workers(monkeypatch):
    run_ranks(_identify, 1, "so that the fork server is there")
    monkeypatch.setenv("SEEN_BY_RANKS", "yes")
    monkeypatch.setenv("MASTER_PORT", "not a port")
    assert run_ranks(_load_with_workers, 1) == [("yes", [[0, 1], [2, 3]])]


def test_results_come_in_rank_order():
    assert run_ranks(_identify, 3, "x") == [(rank, 3, 1, "x") for rank in range(3)]


def test_an_exception_is_raised_again_with_its_traceback():
    with pytest.raises(ValueError, match="broken here") as caught:
        run_ranks(_fail, 2, 1, "value")
    assert "rank 1 of 2:" in caught.value.__notes__[0]
    assert 'raise ValueError("broken here")' in caught.value.__notes__[0]


def test_an_exception_that_cannot_travel_is_told():
    with pytest.raises(RankError, match="OddError: 1 and 2"):
        run_ranks(_fail, 2, 0, "odd")


def test_an_exit_is_a_failure():
    with pytest.raises(SystemExit):
        run_ranks(_fail, 2, 0, "exit")


def test_a_result_that_cannot_be_pickled_is_told():
    with pytest.raises((AttributeError, TypeError, RankError), match="pickle"):
        run_ranks(_fail, 2, 0, "lambda")


def test_a_killed_rank_is_named_with_its_exit_code():
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        run_ranks(_fail, 2, 1, "kill")


def test_a_rank_that_hangs_is_killed_and_its_place_told():
    with pytest.raises(RankError, match=r"rank 1 did not end\ntime limit 8 s\nrank 1 was at:") as caught:
        run_ranks(_fail, 2, 1, "sleep", timeout_s=8)  # enough to come there on a busy machine, and not to end
    assert "in _fail" in str(caught.value)


def _crash_at_the_end():
    multiprocessing.util.Finalize(None, os.abort, exitpriority=0)


def test_a_crash_after_the_result_is_told():
    with pytest.raises(RankError, match="returned, and then ended with an exit code: rank 0 with -6, rank 1 with -6"):
        run_ranks(_crash_at_the_end, 2)


def test_a_nested_function_is_refused():
    def nested():
        pass

    with pytest.raises(ValueError, match="is defined inside another object; move it to its module's top level"):
        run_ranks(nested, 2)


@pytest.mark.slow
def test_modules_that_are_named_are_imported_before_the_ranks_begin(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom tr_dist.testing import run_ranks\n"
        "def has(*names): return [name in sys.modules for name in names]\n"
        "if __name__ == '__main__': print(run_ranks(has, 1, 'this', 'colorsys', 'turtle'))\n"
    )
    named = {**os.environ, "TR_RANKS_PRELOAD": "colorsys no_such_module"}
    done = subprocess.run([sys.executable, script], env=named, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "[[False, True, False]]\n", done.stderr
