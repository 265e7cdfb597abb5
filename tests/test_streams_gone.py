"""A run ends well whatever becomes of the streams that it shows itself on; the command says so by its exit code."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared.commands import TRAINER

pytestmark = pytest.mark.skipif(os.name != "posix", reason="descriptors as POSIX has them")

SCRIPT = Path(__file__).parent / "streams_run.py"
LIMIT_S = 150
sys.path.insert(0, str(SCRIPT.parent))
from streams_run import CASES, CONDITIONS  # noqa: E402


@contextlib.contextmanager
def led_away(condition):
    """Yield what becomes of stdout and stderr, and of the environment."""
    if condition == "reader gone":
        reader, writer = os.pipe()
        os.close(reader)
        try:
            yield writer, {}
        finally:
            os.close(writer)
    elif condition == "full disk":
        with open("/dev/full", "w") as full:
            yield full, {}
    elif condition == "ascii":
        yield subprocess.DEVNULL, {"PYTHONIOENCODING": "ascii:strict"}
    else:
        yield subprocess.DEVNULL, {}


def run(words, condition, folder):
    if condition == "full disk" and not os.path.exists("/dev/full"):
        pytest.skip("there is no such device here")
    if condition == "no descriptors":
        words = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words]
    with led_away(condition) as (stream, variables):
        others = ("TORCHELASTIC", "PYTHONUNBUFFERED", "PYTHONIOENCODING")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        done = subprocess.run(
            words, stdout=stream, stderr=stream, env={**kept, **variables}, cwd=folder, timeout=LIMIT_S, check=False
        )
    return done.returncode


def check_all_is_there(folder):
    assert json.loads((folder / "checkpoint-6" / "manifest.json").read_text())
    assert (folder / "model.safetensors").stat().st_size > 100
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in line for line in lines) == 6
    assert any("eval_genauigkeit_für_alle" in line for line in lines)
    assert "train_runtime" in json.loads((folder / "train_results.json").read_text())


@pytest.mark.slow
def test_a_run_ends_well_whatever_becomes_of_its_streams(tmp_path):
    words = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, timeout=4 * LIMIT_S, check=True)
    codes = dict(zip(CASES, map(int, done.stdout.split()[-len(CASES) :]), strict=True))
    assert codes == dict.fromkeys(CASES, 0)
    for number in range(len(CASES)):
        check_all_is_there(tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.parametrize("condition", CONDITIONS)
def test_two_ranks_end_well_whatever_becomes_of_their_streams(tmp_path, condition):
    launch = [sys.executable, TRAINER, "launch", "--nproc", "2", str(SCRIPT), str(tmp_path / "out"), condition]
    assert run(launch, condition, tmp_path) == 0
    check_all_is_there(tmp_path / "out")


@pytest.mark.parametrize("words", [["version"], ["--help"]])
@pytest.mark.parametrize(
    ("condition", "expected"), [("reader gone", 141), ("no descriptors", 0), ("ascii", 0), ("full disk", 1)]
)
def test_the_command_ends_quietly_where_nobody_reads_it(tmp_path, condition, expected, words):
    assert run([sys.executable, TRAINER, *words], condition, tmp_path) == expected


def test_nothing_is_said_of_a_reader_that_went_away(tmp_path):
    command = f'"{sys.executable}" "$0" --help | true; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", command, TRAINER], capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT_S, check=True
    )
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")
