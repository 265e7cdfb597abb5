"""Pushes on demand, and a whole run in a process of its own."""

import os
import subprocess
import sys

import pytest
from ckpt_hub import Run
from minihub import TOKEN

from tr_ckpt import PushError

# The client's own way of sending a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning")


def test_a_folder_can_be_pushed_on_demand(hub, tmp_path):
    run = Run(tmp_path / "out", hub)
    folder = tmp_path / "folder"
    (folder / "checkpoint-3").mkdir(parents=True)
    (folder / "sub").mkdir()
    for name in ("README.md", "sub/x.txt", "_no", "checkpoint-3/no"):
        (folder / name).write_text(name)
    url = run.callback.push_to_hub(folder, "My message")
    assert url.startswith(f"{hub.endpoint}/ci/run/commit/")
    assert hub.files("ci/run") == ["README.md", "sub/x.txt"]
    assert hub.titles("ci/run")[-1] == "My message"

    gate = hub.hold("POST", "/preupload/")
    future = run.callback.push_to_hub(folder, commit_message="Later", blocking=False)
    (folder / "README.md").write_text("changed since")
    gate.set()
    assert future.result(30).startswith(hub.endpoint)
    assert hub.read("ci/run", "README.md") == b"README.md"


def test_a_push_on_demand_that_fails_raises(hub, tmp_path):
    run = Run(tmp_path / "out", hub)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").touch()
    hub.fail("POST", "/commit/", status=403)
    with pytest.raises(PushError, match=r"'End of training' was not pushed to ci/run: .*injected fault"):
        run.callback.push_to_hub(tmp_path / "out")


SCRIPT = """
import logging, sys
from types import SimpleNamespace
from ckpt_parts import parts
from tr_ckpt import Checkpointer, HubCallback
logging.basicConfig(level=logging.DEBUG)
out = sys.argv[1]
args = SimpleNamespace(output_dir=out, hub_model_id=None, hub_token=None, hub_private_repo=True, hub_revision=None,
                       hub_strategy=SimpleNamespace(value="checkpoint"), hub_always_push=True)
callback = HubCallback.from_arguments(args)
print(callback, callback.repository, vars(callback))
state = SimpleNamespace(global_step=1, is_world_process_zero=True)
callback.on_init_end(args, state, None)
Checkpointer(out).save(1, parts(1), on_commit=lambda folder: callback.on_checkpoint(folder, 1))
callback.on_train_end(args, state, None, error=None)

from huggingface_hub import snapshot_download
folder = snapshot_download("ci/my-run", allow_patterns="last-checkpoint/*")
into = parts()
print("restored", Checkpointer("elsewhere").restore(into, folder + "/last-checkpoint"), into["model"].number)
"""


def test_a_run_is_pushed_and_goes_on_from_the_hub_and_its_token_is_nowhere(hub, tmp_path):
    """In a process of its own, where the client is imported with the environment that a user would set."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output_dir = tmp_path / "my-run"
    done = subprocess.run(
        [sys.executable, str(script), str(output_dir)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "restored 1 1" in done.stdout
    assert hub.repositories["ci/my-run"].private
    assert "last-checkpoint/manifest.json" in hub.files("ci/my-run")
    assert hub.titles("ci/my-run")[-1] == "Training in progress, step 1"  # nothing new at the end: no commit
    assert TOKEN not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
