"""Train on XLA, on PJRT's CPU: on one device, and on four that one process has; there is no TPU here.

Scenarios are run in a few processes (see `xla_scenarios.py`), each a test.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = 1800  # for a group, on a busy machine: most of it is the compiler's

pytestmark = [
    pytest.mark.column("xla"),
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla (nox -s 'backend(xla)')"),
]

# What the environment of a group's process says beside PJRT_DEVICE.
VARIABLES = {
    "replica": {},
    "devices": {"CPU_NUM_DEVICES": "4"},
    "sharded": {},
    "bf16": {"XLA_USE_BF16": "1"},
    "downcast": {"XLA_DOWNCAST_BF16": "1"},
    "optimizers": {},
}


def scenarios():
    import xla_scenarios

    return [
        pytest.param(group, name, id=f"{group}-{name}", marks=[pytest.mark.row(function.row)] if function.row else [])
        for group in VARIABLES
        for name, function in xla_scenarios.SCENARIOS.items()
        if group in function.groups
    ]


def optimizers():
    import test_optimizers

    return test_optimizers.optimizers()


# Programs are compiled for one run of a tiny model: what they take is the compiler's time.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def environment(**more):
    plain = {name: value for name, value in os.environ.items() if name != "USE_TORCH_XLA"}
    folders = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**plain, "PJRT_DEVICE": "CPU", "PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "XLA_FLAGS": QUICK, **more}


def run(arguments, **more):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(**more),
        check=False,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run a group at its first scenario, and remember what came of each."""
    known = {}

    def look_up(group, name):
        if group not in known:
            folder = tmp_path_factory.mktemp(group)
            found = folder / "results.json"
            ended = run([HERE / "xla_scenarios.py", group, folder], **VARIABLES[group])
            while group == "optimizers" and found.exists() and len(json.loads(found.read_text())) < len(optimizers()):
                ended = run([HERE / "xla_scenarios.py", group, folder])
            known[group] = json.loads(found.read_text()) if found.exists() else {}
            if ended.returncode:
                known[group]["ended"] = f"exit code {ended.returncode}\n{ended.stderr[-3000:]}"
        return known[group].get(name, known[group].get("ended", "it was not run"))

    return look_up


@pytest.mark.parametrize(("group", "name"), scenarios() if find_spec("torch_xla") else [])
def test_xla(results, group, name):
    assert not (failure := results(group, name)), failure


@pytest.mark.parametrize("name", optimizers() if find_spec("torch_xla") else [])
def test_each_optimizer_trains_as_in_one_process_or_is_refused(results, name, record_property):
    found = results("optimizers", name)
    if found.startswith("refused: "):
        record_property("refused", found.removeprefix("refused: "))
        found = ""
    if found.startswith("needs "):
        pytest.skip(found)
    assert not found, found


LAUNCHED = """
import torch_xla
from tr_dist.xla import XLA

def train(index):
    XLA(use_cpu=True)

if __name__ == "__main__":
    torch_xla.launch(train)
"""


@pytest.mark.row("refused")
def test_replicas_on_the_cpu_are_refused(tmp_path):
    """They would wait for each other until the process is aborted."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    ended = run([script], CPU_NUM_DEVICES="2")
    assert ended.returncode
    assert "2 replicas on PJRT's CPU (CPU_NUM_DEVICES=2) cannot exchange gradients" in ended.stderr


def test_xla_is_not_taken_because_it_can_be_imported():
    code = (
        "import sys; from tr_core import TrainingArguments; from tr_core.choose_strategy import choose_strategy;"
        "strategy = choose_strategy(TrainingArguments(output_dir='x'));"
        "print(type(strategy).__name__, 'torch_xla' in sys.modules)"
    )
    assert run(["-c", code], PJRT_DEVICE="").stdout.split() == ["SingleDevice", "False"]
    assert run(["-c", code]).stdout.split() == ["XLA", "True"]
    assert run(["-c", code], USE_TORCH_XLA="0").stdout.split() == ["SingleDevice", "False"]
