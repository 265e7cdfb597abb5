"""Pushes and downloads with Xet, which keeps large files outside of the Hub's own requests."""

import subprocess
import sys

import pytest
from ckpt_hub import environment
from minihub import TOKEN

SCRIPT = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from ckpt_hub import Run
from ckpt_parts import number_of, parts
from tr_ckpt import Checkpointer
endpoint, out = sys.argv[1:]
run = Run(out, SimpleNamespace(endpoint=endpoint), strategy="checkpoint")
run.settle()
for step in (1, 2):
    run.push(step)
run.finish()
into = parts()
assert Checkpointer(out + "-fresh").restore(into, "hub:ci/run") == 2
print("restored", number_of(into))
"""


@pytest.mark.parametrize("is_disabled", [False, True])
def test_a_push_is_one_commit_and_comes_back_the_same(is_disabled, hub, tmp_path):
    pytest.importorskip("hf_xet")
    hub.xet_folder = None if is_disabled else tmp_path / "xet"
    hub.fail("POST", "/commit/", drop="unanswered")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, hub.endpoint, str(tmp_path / "out")],
        env=environment(hub, tmp_path / "home", HF_HUB_DISABLE_XET=str(int(is_disabled))),
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "restored 2" in done.stdout, done.stdout + done.stderr
    titles = ["Training in progress, step 1", "Training in progress, step 2", "End of training"]
    assert hub.titles("ci/run")[1:] == titles
    held = {blob.xet_bytes is not None for blob in hub.history("ci/run")[-1].tree.values() if blob.sha256}
    assert held == {not is_disabled}
    assert any(method == "PUT" for method, _ in hub.log) is is_disabled
    assert TOKEN not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
