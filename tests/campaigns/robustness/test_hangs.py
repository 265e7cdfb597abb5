"""Ranks that hang or fail in every way: who it is, where, and for whom the others wait is said, and all end."""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rank_programs import Nursery, free_port

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("hang_run.py")
CODE = 97
LIMIT_S = 90  # of a job; a hang is ended after 5 s
WITHIN_S = 40  # from the strike to the end of all; on an idle machine it is 7


@dataclass(frozen=True)
class Case:
    """What is planted, and what has to be said.

    Attributes:
        plant: its name in `hang_run.py`.
        strategy: `ddp` or `fsdp`.
        said: patterns that must be found in what the ranks say, in this order.
        codes: exit code of each rank; None for any but 0.
        rank: which one it is.
        reports: whether a report is written beside the run; None if it depends on who is faster.
        by_port: whether the ranks meet by TCP.
        world_size: number of ranks.
    """

    plant: str
    strategy: str
    said: tuple[str, ...]
    codes: tuple[int | None, ...] = (CODE, CODE)
    rank: int = 1
    reports: bool | None = True
    by_port: bool = False
    world_size: int = 2
    options: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return (
            f"{self.plant}, {self.strategy}"
            + (", by TCP" if self.by_port else "")
            + f", rank {self.rank}{' '.join(self.options)}"
        )


def waits(where, step=2, rank=1, others="rank 0", phase="compute"):
    """Return patterns of a hang in which a rank is somewhere and the other waits for it."""
    return (
        rf"no rank has made progress for \d+ s; the others wait for rank {rank}\n",
        rf"  rank {rank} \(process \d+ on .*\): step {step}, {phase}: no progress for \d+ s, in {where}",
        rf"  {others} \(process \d+ on .*\): step {step}, .*has waited \d+ s for rank {rank}, in ",
        "all processes end with exit code 97",
        f"--- rank {rank}\nthread MainThread:",
    )


SILENT = r"  rank {rank} .*gives no sign for \d+ s: {why}; its last note is .*step \d"
# gloo ends a process that gets values of another size than it expects.
MISMATCH = r"rank [01] .*(its process ended without a word; .*step 2|waited \d+ s for rank)"
FAILED = r"  rank 1 .*: left after step 2, compute: ArithmeticError: planted"

CASES = (
    Case("sleep in a step", "ddp", waits(r"sleep at .*hang_run\.py:\d+")),
    Case("sleep in a step", "fsdp", waits(r"sleep at .*hang_run\.py:\d+"), by_port=True),
    Case("sleep in loading", "ddp", waits(r"sleep at .*hang_run\.py:\d+", phase="data"), by_port=True),
    Case("sleep in loading", "fsdp", waits(r"sleep at .*hang_run\.py:\d+", phase="data")),
    Case("sleep in a callback", "ddp", ("the others wait for rank 2", "rank 0 .*for rank 2", "rank 1 .*for rank 2"),
         rank=2, world_size=3, codes=(CODE,) * 3),
    Case("sleep in a callback", "ddp", ("no rank waits for another", "rank 0 .*: step 2, compute: no progress"),
         rank=-1),
    Case("sleep in saving", "ddp", waits(r"sleep at .*hang_run\.py:\d+", rank=0, others="rank 1", phase="checkpoint"),
         rank=0),
    Case("sleep in saving", "fsdp", waits(r"sleep at .*hang_run\.py:\d+", phase="checkpoint")),
    Case("sleep in evaluating", "ddp", waits(r"sleep at .*hang_run\.py:\d+", phase="evaluation"), by_port=True),
    Case("infinite loop", "fsdp", waits(r"loop_forever at .*hang_run\.py:\d+")),
    Case("held lock", "ddp", (SILENT.format(rank=1, why=".*Python's lock"), "hold_the_lock"), codes=(CODE, -9)),
    Case("skipped exchange", "ddp", ("rank 0 .*broadcast|rank 0 .*all_reduce",)),
    Case("skipped exchange", "fsdp", ("in different exchanges", r"rank 0 .*in broadcast", r"rank 1 .*in all_gather")),
    Case("other order", "ddp", ("rank 0 and 1 are in different exchanges", "monitored_barrier", "broadcast")),
    Case("one evaluates", "ddp", ("in different exchanges", r"rank 1 .*step 2, evaluation: .*in _check_same_data")),
    Case("one evaluates", "fsdp", ("in evaluate_alone\n",), codes=(None, None), reports=None, by_port=True),
    Case("stopped", "ddp", (SILENT.format(rank=1, why=r".*SIGSTOP\)"), "has waited .* for rank 1"), codes=(CODE, -9)),
    Case("stopped", "ddp", (SILENT.format(rank=0, why=r".*SIGSTOP\)"), "has waited .* for rank 0"), codes=(-9, CODE),
         rank=0, by_port=True),
    Case("sleep in a step", "ddp", ("the others wait for rank 2", "rank 0 .*for rank 2", "rank 1 .*for rank 2",
         "--- rank 2\nthread MainThread:"), rank=2, world_size=3, codes=(CODE,) * 3, by_port=True,
         options=("--machines",)),
    Case("stopped", "ddp", (SILENT.format(rank=0, why=r".*SIGSTOP\)"), "has waited .* for rank 0"), codes=(-9, CODE),
         rank=0, by_port=True, options=("--machines",)),
    Case("stopped", "fsdp", (SILENT.format(rank=1, why=r".*SIGSTOP\)"),), codes=(CODE, -9)),
    Case("killed", "ddp", ("when rank 0 failed, others were gone", "rank 1 .*its process ended without a word"),
         codes=(None, -9), reports=False),
    Case("killed", "fsdp", ("rank 1 .*its process ended without a word",), codes=(None, -9), reports=False),
    Case("killed unnoticed", "fsdp", ("rank 0 waits for rank 1, which is gone", "rank 1 .*ended without a word",
         r"rank 0 .*for rank 1, in reduce_scatter"), codes=(CODE, -9)),
    Case("killed unnoticed", "ddp", ("rank 0 waits for rank 1, which is gone", "rank 0 .*for rank 1, in backward"),
         codes=(CODE, -9)),
    Case("killed worker", "ddp", (r"DataLoader worker \(pid|ConnectionResetError", r"rank 1 .*: left after step 2"),
         codes=(None, 1), reports=False),
    Case("full disk", "fsdp", ("No space left on device",), codes=(1, 1), reports=False),
    Case("exception", "ddp", ("ArithmeticError: planted", FAILED), codes=(None, 1), reports=False),
    Case("exception in a callback", "fsdp", ("ArithmeticError: planted", FAILED), codes=(None, 1), reports=False),
    Case("early end", "ddp", (MISMATCH,), codes=(None, None), reports=None),
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    with Nursery(PROGRAM) as nursery:
        yield nursery


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_who_hangs_or_fails_where_and_for_whom_is_said_and_all_end(ranks, tmp_path, case):
    (tmp_path / "out").mkdir()
    options = [tmp_path / "out", case.plant, "--strategy", case.strategy, "--rank", case.rank, *case.options]
    if case.by_port:
        options += ["--port", free_port()]
    ends = ranks.run(case.world_size, options, tmp_path / "job", LIMIT_S)
    said = ends[0].said
    assert ranks.left_over(35.0 if "unnoticed" in case.plant else 5.0) == [], said
    codes = tuple(end.code for end in ends)
    assert all(code == wanted if wanted is not None else code not in (0, None)
               for code, wanted in zip(codes, case.codes, strict=True)), (codes, said)  # fmt: skip
    for pattern in case.said:
        assert re.search(pattern, said), (pattern, said)
    if (struck := tmp_path / "out/struck").exists():
        assert max(end.time_s for end in ends) - float(struck.read_text()) < WITHIN_S
    files = list((tmp_path / "out/run").glob("hang-*.txt"))
    assert case.reports in (None, bool(files)), said
    for file in files:
        assert "--- rank 0" in file.read_text()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_disk_that_goes_on_is_no_hang_however_slow_it_is(ranks, tmp_path, strategy):
    began_s = time.monotonic()
    options = [tmp_path, "slow disk", "--strategy", strategy, "--rank", 0, "--arguments", '{"hang_timeout": 2}']
    ends = ranks.run(2, options, tmp_path / "job", LIMIT_S)
    assert [end.code for end in ends] == [0, 0], ends[0].said
    assert time.monotonic() - began_s > 4
    assert not list((tmp_path / "run").glob("hang-*"))


def test_an_evaluation_that_goes_on_is_no_hang_however_long_it_takes(ranks, tmp_path, monkeypatch):
    began_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANG_RUN_PAUSE_S", "0.6")
        with Nursery(PROGRAM) as slow:
            options = [tmp_path, "nothing", "--arguments", '{"per_device_eval_batch_size": 1, "hang_timeout": 2, '
                       '"eval_steps": 8}']  # fmt: skip
            ends = slow.run(2, options, tmp_path / "job", LIMIT_S)
    assert [end.code for end in ends] == [0, 0], ends[0].said
    assert time.monotonic() - began_s > 2
    assert not list((tmp_path / "run").glob("hang-*"))
