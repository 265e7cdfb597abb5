"""LLaMA-Factory's five stages train to the same numbers on this Trainer as on that of transformers, unedited.

They run where `llamafactory` is installed (`nox -s llama_factory`), or where LLAMA_FACTORY_SOURCE names the folder of
its sources. LLAMA_FACTORY_DATA may name the folder of its demonstration data.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from compared import DROP_IN, logged

STAGE = Path(__file__).with_name("llama_factory.py")
SOURCE = os.environ.get("LLAMA_FACTORY_SOURCE", "")

pytestmark = pytest.mark.skipif(
    not SOURCE and not find_spec("llamafactory"),
    reason="needs LLaMA-Factory, which takes another TRL: nox -s llama_factory, or LLAMA_FACTORY_SOURCE",
)


def run(command, folder, stage, *more):
    paths = [SOURCE, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "DISABLE_VERSION_CHECK": "1",  # it does not name this version of transformers yet
    }
    words = [*command, str(STAGE), stage, str(folder), *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("stage", ["pt", "sft", "rm", "dpo", "kto"])
def test_a_stage_logs_the_same_numbers_and_learns_the_same_weights(tmp_path, stage):
    theirs = run([sys.executable], tmp_path / "theirs", stage)
    ours = run(DROP_IN, tmp_path / "ours", stage)
    assert theirs["base"] == "transformers.trainer"
    assert ours["base"] == "tr_core.trainer"
    assert logged(ours) == logged(theirs)
    assert ours["weights"] == theirs["weights"]
    missing = set(theirs["final"]) - set(ours["final"])
    assert missing <= {"training_args.bin"}  # a pickle; ours is training_args.json


def test_a_stage_resumes_to_the_bit(tmp_path):
    whole = run(DROP_IN, tmp_path / "whole", "sft")
    resumed = run(DROP_IN, tmp_path / "resumed", "sft", str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed["weights"] == whole["weights"]
