"""Start real processes by real launchers. TR_DIST_EXITS says how often each clean end is tried (default 1)."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from meetings import free_port

from tr_dist.testing import run_ranks

HERE = Path(__file__).parent
SCRIPT = HERE / "scripts" / "train_and_end.py"
TRIES = int(os.environ.get("TR_DIST_EXITS", "1"))
LIMIT_S = 240  # of a process: on a busy machine even importing torch takes its time


def _torchrun(*arguments, cwd):
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def _start_ranks(how):
    """Start two ranks by hand; return their exit codes and what they wrote to stderr."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), how],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "nothing"])
def test_processes_end_cleanly_every_time(how):
    for _ in range(TRIES):
        assert _start_ranks(how)[0] == [0, 0]


@pytest.mark.launcher
def test_a_failing_rank_ends_all_with_its_traceback():
    codes, errors = _start_ranks("raise")
    assert codes == [1, 1]
    assert "ArithmeticError: rank 1 fails in step 10" in errors[1]
    [named] = [line for line in errors[0].splitlines() if "ArithmeticError" in line]
    assert named.startswith("  rank 1 (process ")
    assert named.endswith("ArithmeticError: rank 1 fails in step 10")


def _readme_example(heading_word):
    blocks = re.findall(r"```python\n(.*?)```", (HERE.parent / "README.md").read_text(), flags=re.DOTALL)
    return next(block for block in blocks if heading_word in block)


def _printed(code):
    """Return what an example prints that concerns this process."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(code, "README.md", "exec"), {})
    # Gloo of older versions of torch writes to the same place.
    return [line for line in said.getvalue().splitlines() if ", loss " in line]


@pytest.mark.slow
@pytest.mark.launcher
def test_the_readmes_four_lines_distribute_a_loop(tmp_path):
    (tmp_path / "loop.py").write_text(_readme_example("with Loop()"))
    both = _torchrun("--standalone", "--nproc-per-node", 2, "loop.py", cwd=tmp_path)
    assert both.returncode == 0, both.stderr
    # One process has steps of 8 rows and two have steps of 16: the losses are not alike.
    lines = _printed(_readme_example("with Loop()")) + [x for x in both.stdout.splitlines() if ", loss " in x]
    assert [line.split(", loss ")[0] for line in lines] == ["1 processes", "2 processes"]
    assert all(float(line.split(", loss ")[1]) < 10 for line in lines)


def test_the_readmes_loop_trains_alike_alone_and_in_two_processes():
    example = _readme_example("strategy.accumulate")
    [one], ([two], []) = _printed(example), run_ranks(_printed, 2, example)
    assert one.startswith("1 processes, loss ")
    assert two.startswith("2 processes, loss ")
    assert one.split("loss")[1] == two.split("loss")[1]


def test_the_readmes_test_example_runs(tmp_path):
    (tmp_path / "total.py").write_text(_readme_example("run_ranks"))
    subprocess.run([sys.executable, "total.py"], cwd=tmp_path, timeout=LIMIT_S, check=True)


RESTARTED = """
import os, torch
from tr_dist import DDP
with DDP(use_cpu=True) as strategy:
    strategy.sum(torch.ones(1))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and strategy.rank == 1:
        os._exit(9)
    total = int(strategy.sum(torch.ones(1)))
print(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']} has {total} ranks", flush=True)
"""


@pytest.mark.launcher
@pytest.mark.slow
def test_a_job_that_torchrun_restarts_meets_again(tmp_path):
    (tmp_path / "restarted.py").write_text(RESTARTED)
    place = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    done = _torchrun("--nproc-per-node", 2, "--max-restarts", 1, *place, "restarted.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("restart 1 has 2 ranks") == 2
