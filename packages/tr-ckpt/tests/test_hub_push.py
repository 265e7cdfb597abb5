"""Pushes on demand."""

import errno
import os
import shlex

import pytest
from ckpt_hub import Run

from tr_ckpt import CheckpointError, PushError, files, manifest
from tr_ckpt.hub import hub_callback, snapshot

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


SECRETS = (
    ".env", ".netrc", ".git/config", "_private", "_private.d/x", "wandb/run-1/x", "mlruns/0/x", "core.4711",
    "hang-20260101-000000.txt", "core.python.4711", "core", "nohup.out", "x.lock", "__pycache__/x.pyc",
)  # fmt: skip


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.mark.parametrize("depth", ["", "a/", "a/b/c/"])
def test_private_names_stay_at_home_at_every_depth_and_are_said_once(depth, hub, tmp_path, caplog):
    run, folder = Run(tmp_path / "out", hub), tmp_path / "folder"
    kept = [f"{depth}{name}" for name in ("README.md", "core.py", "model/__init__.py", "core.d/core/x", "wandb.md")]
    own = [f"{depth}{name}" for name in ("events.jsonl", "report.html", "checkpoint-5/x", "profile/x")]
    fill(folder, *kept, *own, *(depth + name for name in SECRETS))
    run.callback.push_to_hub(folder)
    assert hub.files("ci/run") == sorted(kept)
    [said] = [text for text in caplog.messages if text.startswith("not pushed with")]
    assert f"{depth}.env (a private name), {depth}.git (a private name)" in said
    assert said.endswith(" and 11 more")
    assert "report" not in said
    caplog.clear()
    run.callback.push_to_hub(folder)
    assert "not pushed" not in caplog.text
    fill(folder, "new/.env")
    run.callback.push_to_hub(folder)
    assert [text for text in caplog.messages if "not pushed" in text] == [
        f"not pushed with {folder}: new/.env (a private name)"
    ]


def test_links_to_folders_and_out_of_the_folder_are_not_followed(hub, tmp_path, caplog):
    run, folder = Run(tmp_path / "out", hub), tmp_path / "folder"
    fill(tmp_path, "elsewhere/secret.txt", "sibling/.env", "sibling/model.bin")
    fill(folder, "README.md", "sub/x.txt", ".env", "checkpoint-5/model.safetensors", "events.jsonl", "core")
    links = {
        "latest": "checkpoint-5", "data": tmp_path / "elsewhere", "up": "..", "here": ".", "sub/again": "..",
        "secret.txt": "../elsewhere/secret.txt", "env.txt": ".env", "events.txt": "events.jsonl",
        "dump": "core", "gone": "nowhere", "a": "b", "b": "a",
        "readme.txt": "README.md", "model.safetensors": "checkpoint-5/model.safetensors", "sub/y.txt": "x.txt",
    }  # fmt: skip
    for name, target in links.items():
        (folder / name).symlink_to(target)
    link = tmp_path / "link"
    link.symlink_to(folder)  # the folder itself may be reached by one
    run.callback.push_to_hub(link)
    assert hub.files("ci/run") == [
        "README.md", "model.safetensors", "readme.txt", "sub/x.txt", "sub/y.txt",
    ]  # fmt: skip
    assert hub.read("ci/run", "readme.txt") == b"README.md"
    left_out = dict(each.rpartition(" (")[::2] for each in snapshot.public_files(folder, "checkpoint")[1])
    assert left_out == {
        ".env": "a private name)", "latest": "a link to a folder)", "data": "a link to a folder)",
        "up": "a link to a folder)", "here": "a link to a folder)", "sub/again": "a link to a folder)",
        "secret.txt": "a link out of the folder)", "env.txt": "a link to a private name)",
        "events.txt": "a link to a private name)", "dump": "a link to a private name)", "core": "a core dump)",
        "gone": "a link to nothing)", "a": "a link to nothing)", "b": "a link to nothing)",
    }  # fmt: skip
    assert " and 11 more" in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_no_regular_file_is_left_out_in_words(hub, tmp_path, caplog):
    run, folder = Run(tmp_path / "out", hub), tmp_path / "folder"
    fill(folder, "README.md")
    os.mkfifo(folder / "pipe")
    run.callback.push_to_hub(folder)
    assert hub.files("ci/run") == ["README.md"]
    assert "pipe (no regular file)" in caplog.text


def test_a_checkpoint_is_pushed_with_the_files_of_its_manifest_and_public_ones(hub, tmp_path):
    run = Run(tmp_path / "out", hub, strategy="end")
    run.save(1)
    checkpoint = run.output_dir / "checkpoint-1"
    fill(checkpoint, "README.md", ".env", "wandb/x", "sub/.netrc")
    (checkpoint / "up").symlink_to("..")
    copy = tmp_path / "copy"
    copy.mkdir()
    snapshot.link_checkpoints(copy, {"last": checkpoint}, {"last": checkpoint})
    held = {path.relative_to(copy / "last").as_posix() for path in (copy / "last").rglob("*") if path.is_file()}
    assert held == {"README.md", "manifest.json", *manifest.read(checkpoint).files}


def test_a_checkpoint_that_holds_a_secret_or_a_link_elsewhere_is_not_pushed(hub, tmp_path):
    run = Run(tmp_path / "out", hub, strategy="end")
    run.checkpointer.save(1, {}, write_extra=lambda folder: (folder / ".env").write_text("x"))
    run.checkpointer.save(2, {}, write_extra=lambda folder: (folder / "config.json").write_text("{}"))
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    linked = run.output_dir / "checkpoint-2"
    (linked / "config.json").unlink()
    (linked / "config.json").symlink_to(outside)
    for folder, message in (
        (run.output_dir / "checkpoint-1", r"checkpoint-1 holds \.env, which is never pushed"),
        (linked, r"config\.json is a link out of checkpoint-2"),
    ):
        copy = tmp_path / f"copy of {folder.name}"
        copy.mkdir()
        with pytest.raises(CheckpointError, match=message):
            snapshot.link_checkpoints(copy, {"last": folder}, {"last": folder})
    assert snapshot.model_files(run.output_dir / "checkpoint-1") == []


def test_the_command_that_pushes_later_leaves_private_names_out_too(hub, tmp_path):
    utils = pytest.importorskip("huggingface_hub.utils")
    run = Run(tmp_path / "out", hub)
    [command] = hub_callback._upload_commands(run.repository, run.output_dir, "checkpoint", {})
    words = shlex.split(command)
    excluded = words[words.index("--exclude") + 1 :]
    names = [
        f"{depth}{name}" for depth in ("", "a/", "a/b/") for name in (*SECRETS, "checkpoint-5/x") if name != "core"
    ]
    kept = ["README.md", "a/model.safetensors"]
    assert list(utils.filter_repo_objects([*kept, *names], ignore_patterns=excluded)) == kept


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP])
def test_files_that_cannot_be_linked_are_copied(tmp_path, monkeypatch, code):
    def link(source, target):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "link", link)
    (tmp_path / "one").write_text("content")
    snapshot.link_files(tmp_path, tmp_path / "copy", ["one"])
    assert (tmp_path / "copy" / "one").read_text() == "content"


def test_a_file_that_somebody_else_puts_there_meanwhile_is_not_written_over(tmp_path, monkeypatch):
    def link(source, target):
        target.write_text("theirs")
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(files, "link", link)
    (tmp_path / "one").write_text("content")
    snapshot.link_files(tmp_path, tmp_path / "copy", ["one"])
    assert (tmp_path / "copy" / "one").read_text() == "theirs"
