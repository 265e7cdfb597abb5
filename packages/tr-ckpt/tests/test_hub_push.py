"""Pushes on demand."""

import pytest
from ckpt_hub import Run

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
