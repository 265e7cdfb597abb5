"""Going on from a checkpoint that is on the Hub."""

import json
import os
import re
from types import SimpleNamespace

import ckpt_hub
import pytest
from ckpt_hub import Run
from ckpt_parts import listed, number_of, parts, restored, sealed
from ckpt_workers import run
from minihub import TOKEN, wait_until

from tr_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, HubRepository
from tr_ckpt.hub import resume
from tr_ckpt.ranks import Failure

pytestmark = [
    # The client's own way of sending a file, and of saying that it tries again.
    pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    """Have the client not sleep before it tries again."""
    for name in ("utils._http", "file_download"):
        module = pytest.importorskip(f"huggingface_hub.{name}")
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))


def pushed(hub, folder, *, steps=(1, 2), strategy="checkpoint", **options):
    """Push the checkpoints of a run."""
    run = Run(folder, hub, strategy=strategy, always_push=True, **options)
    for step in steps:
        run.push(step)
    return run


def reading(hub, folder, **options):
    """Return a checkpointer of a fresh run, whose own repository is `ci/run`."""
    options = {"repo_id": "ci/run", "token": TOKEN, "endpoint": hub.endpoint, "retry_delays_s": (0, 0)} | options
    return Checkpointer(folder, hub=lambda: HubRepository(**options))


def test_a_fresh_machine_goes_on_from_the_last_checkpoint(hub, tmp_path):
    pushed(hub, tmp_path / "out")
    into = parts()
    assert reading(hub, tmp_path / "fresh").restore(into, "hub") == 2
    assert number_of(into) == 2
    assert list((tmp_path / "fresh").iterdir()) == []  # nothing is left of the download
    assert reading(hub, tmp_path / "fresh").restore(into, "hub:ci/run") == 2
    assert reading(hub, tmp_path / "fresh", repo_id="run").restore(into, "hub") == 2  # whose it is, the token says


def test_a_download_is_progress_for_a_watch_of_hangs_file_by_file_at_the_least(hub, tmp_path, monkeypatch):
    pushed(hub, tmp_path / "out")
    into, counted = tmp_path / "into", []
    commit = resume.commit_of(reading(hub, tmp_path / "fresh")._hub())
    monkeypatch.setattr(resume.slow_work, "advance", lambda: counted.append(1))
    listed_files = commit.below("last-checkpoint")
    commit.download("last-checkpoint", listed_files, into)
    assert len(counted) > 1  # one for all files would be none while a large one comes


def test_the_repository_and_its_branch_are_those_of_the_arguments(hub, tmp_path):
    pushed(hub, tmp_path / "out", revision="exp/1", private=True)
    args = SimpleNamespace(
        output_dir=str(tmp_path / "elsewhere" / "run"), hub_model_id=None, hub_token=TOKEN, hub_private_repo=None,
        hub_revision="exp/1", save_total_limit=None,
    )  # fmt: skip
    alone = SimpleNamespace(rank=0, world_size=1, gather_objects=None)
    checkpointer = Checkpointer.from_arguments(args, alone)
    into = parts()
    assert checkpointer.restore(into, "hub") == 2
    assert checkpointer.restore(into, "hub:ci/run@exp/1") == 2  # with the token of the arguments: it is private
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*/ci/run, commit .*: it holds neither last-"):
        checkpointer.restore(into, "hub:ci/run")  # main


def test_a_checkpoint_of_an_earlier_commit_can_be_named(hub, tmp_path):
    pushed(hub, tmp_path / "out", steps=(1, 2, 3))
    for commit, step in zip(hub.history("ci/run")[1:], (1, 2, 3), strict=True):
        assert restored(reading(hub, tmp_path / "fresh"), f"hub:ci/run@{commit.oid}") == (step, step)


@pytest.mark.parametrize("path", ["/models/ci/run$", "/resolve/.*/manifest.json", "/resolve/.*/extra.safetensors"])
def test_what_is_pushed_meanwhile_changes_nothing(path, hub, tmp_path):
    run = pushed(hub, tmp_path / "out")
    former = hub.repositories["ci/run"].branches["main"]
    hub.log.clear()  # the pushes asked the same: only what is asked from here on is the reader's
    gate = hub.hold("GET", path)
    into = parts()
    future = resume.slow_work.in_thread(lambda: reading(hub, tmp_path / "fresh").restore(into, "hub"))
    wait_until(lambda: any(method == "GET" and re.search(path, asked) for method, asked in hub.log))
    run.push(3)
    gate.set()
    # Held at its first question it sees the newer commit, all of it; later the older one, all of it.
    expected = 3 if path == "/models/ci/run$" else 2
    assert future.result(60) == expected
    assert number_of(into) == expected
    read = {path.split("/resolve/")[1].split("/")[0] for _, path in hub.log if "/resolve/" in path}
    assert read == {former if expected == 2 else hub.repositories["ci/run"].branches["main"]}


def test_of_many_checkpoints_the_newest_is_taken(hub, tmp_path):
    """Newest is what was saved last, not what has the highest step."""
    run = pushed(hub, tmp_path / "out", steps=(9, 10, 30), strategy="all_checkpoints")
    into = parts()
    assert reading(hub, tmp_path / "fresh").restore(into, "hub") == 30
    assert run.checkpointer.restore(parts(), run.checkpointer.path(10)) == 10
    run.push(12)
    hub.log.clear()
    assert reading(hub, tmp_path / "fresh").restore(into, "hub") == 12
    whole = {path.split("/")[-2] for _, path in hub.log if path.endswith(".safetensors")}
    assert whole == {"checkpoint-12"}  # of the others only the manifests were read


def cut(content):
    return content[:-3]


def flip(content):
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGE = [
    ("extra.safetensors", None, "extra.safetensors is missing"),
    ("extra.safetensors", cut, r"extra.safetensors has \d+ bytes in place of \d+"),
    ("extra.safetensors", flip, "extra.safetensors was changed after it was written: its SHA-256 differs"),
    ("manifest.json", cut, "manifest.json is not valid JSON|manifest.json was changed after it was written"),
    ("manifest.json", flip, "manifest.json is not valid JSON|manifest.json was changed after it was written"),
]


@pytest.mark.parametrize(("file", "change", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_named_and_an_earlier_commit_is_offered(file, change, message, hub, tmp_path):
    pushed(hub, tmp_path / "out")
    path = f"last-checkpoint/{file}"
    hub.replace("ci/run", path, change and change(hub.read("ci/run", path)))
    with pytest.raises(DamagedCheckpointError, match=message) as caught:
        reading(hub, tmp_path / "fresh").restore(parts(), "hub")
    text = str(caught.value)
    assert text.startswith(f"no valid checkpoint at {hub.endpoint}/ci/run, commit ")
    offered = re.findall(r"(hub:\S+) \(([^)]*)\)", text)
    assert [title for _, title in offered][:2] == ["Training in progress, step 2", "Training in progress, step 1"]
    assert restored(reading(hub, tmp_path / "fresh"), offered[0][0]) == (2, 2)


@pytest.mark.parametrize(("file", "change", "message"), DAMAGE)
def test_a_damaged_one_of_many_is_passed_over(file, change, message, hub, tmp_path, caplog):
    pushed(hub, tmp_path / "out", steps=(1, 2, 3), strategy="all_checkpoints")
    path = f"checkpoint-3/{file}"
    hub.replace("ci/run", path, change and change(hub.read("ci/run", path)))
    assert restored(reading(hub, tmp_path / "fresh"), "hub") == (2, 2)
    [warning] = [record.message for record in caplog.records if "skipped" in record.message]
    assert re.search(rf"skipped checkpoint-3 of {hub.endpoint}/ci/run, commit \w+: .*({message})", warning)


def test_a_checkpoint_of_a_newer_version_is_refused(hub, tmp_path):
    pushed(hub, tmp_path / "out")
    path = "last-checkpoint/manifest.json"
    hub.replace("ci/run", path, sealed(json.loads(hub.read("ci/run", path)) | {"format": 99}).encode())
    message = r"last-checkpoint of .*: its format is 99; this version reads \d+ — install a newer tr-ckpt"
    with pytest.raises(CheckpointError, match=message):
        reading(hub, tmp_path / "fresh").restore(parts(), "hub")


def test_a_repository_without_a_checkpoint_is_an_error_in_words(hub, tmp_path):
    pushed(hub, tmp_path / "out", strategy="every_save")
    message = (
        r"no checkpoint at http://127.0.0.1:\d+/ci/run, commit \w{8}: it holds neither last-checkpoint/ nor "
        r"checkpoint-<step>/, which are pushed with hub_strategy='checkpoint' and 'all_checkpoints'"
    )
    with pytest.raises(CheckpointError, match=message):
        reading(hub, tmp_path / "fresh").restore(parts(), "hub")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("hub:ci/other", {}, r"/ci/other at main could not be read: RepositoryNotFoundError"),
        ("hub:ci/run@nowhere", {}, r"/ci/run at nowhere could not be read: RevisionNotFoundError"),
        ("hub", {"token": "hf_WRONGwrong"}, r"/ci/run at main could not be read: .*401"),
        ("hub", {"token": "hf_WRONGwrong", "repo_id": "run"}, "whose repository 'run' is could not be found out, give"),
        ("hub:a/b/c", {}, r"'hub:a/b/c': 'a/b/c' can be no repository on the Hub"),
        ("hub:@main", {}, r"'hub:@main' names no repository: give hub:OWNER/NAME or hub:OWNER/NAME@REVISION"),
    ],
)
def test_what_is_not_there_is_an_error_in_words(source, options, message, hub, tmp_path):
    pushed(hub, tmp_path / "out")
    with pytest.raises(CheckpointError, match=message):
        reading(hub, tmp_path / "fresh", **options).restore(parts(), source)


def test_a_checkpointer_without_a_repository_has_none_to_read(tmp_path):
    with pytest.raises(CheckpointError, match="'hub' names no repository: give hub:OWNER/NAME or"):
        Checkpointer(tmp_path).restore(parts(), "hub")


def test_a_dead_hub_is_an_error_in_words(hub, tmp_path):
    pushed(hub, tmp_path / "out")
    hub.stop()
    message = rf"{hub.endpoint}/ci/run at main could not be read: ConnectError|ConnectionError"
    with pytest.raises(CheckpointError, match=message):
        reading(hub, tmp_path / "fresh").restore(parts(), "hub")


def test_being_told_to_stay_offline_is_an_error_in_words(hub, tmp_path, monkeypatch, caplog):
    constants = pytest.importorskip("huggingface_hub.constants")
    pushed(hub, tmp_path / "out")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.forget_sessions()
    with pytest.raises(CheckpointError, match="at main could not be read: OfflineModeIsEnabled"):
        reading(hub, tmp_path / "fresh").restore(parts(), "hub")
    assert "trying again" not in caplog.text  # it will not pass


@pytest.mark.parametrize("fault", [{"status": 500}, {"drop": "before"}, {"drop": "answer"}, {"drop": "unanswered"}])
@pytest.mark.parametrize("path", ["/revision/", "/tree/", r"/resolve/.*extra\.safetensors", r"/resolve/.*manifest"])
def test_a_fault_on_the_way_is_tried_again(path, fault, hub, tmp_path):
    pushed(hub, tmp_path / "out")
    hub.fail("GET", path, times=2, **fault)
    assert restored(reading(hub, tmp_path / "fresh"), "hub") == (2, 2)


def test_a_download_that_failed_goes_on_where_it_was(hub, tmp_path):
    pushed(hub, tmp_path / "out")
    hub.fail("GET", r"/resolve/.*extra\.safetensors", times=10**6)
    with pytest.raises(CheckpointError, match=r"last-checkpoint/\* of .* was not downloaded: .*500"):
        reading(hub, tmp_path / "fresh").restore(parts(), "hub")
    [left] = (tmp_path / "fresh").iterdir()
    assert left.name.startswith(".tmp-fetched-")
    hub.heal()
    hub.log.clear()
    assert reading(hub, tmp_path / "fresh").restore(parts(), "hub") == 2
    fetched = {path.split("/")[-1] for method, path in hub.log if method == "GET" and "/resolve/" in path}
    assert fetched == {"extra.safetensors"}
    assert list((tmp_path / "fresh").iterdir()) == []


def test_a_download_that_was_left_is_cleared_away_at_the_next_save(hub, tmp_path):
    pushed(hub, tmp_path / "out")
    checkpointer = reading(hub, tmp_path / "fresh")
    with pytest.raises(CheckpointError, match="last-checkpoint: there is no .other. in it"):
        checkpointer.restore({**parts(), "other": parts()["extra"]}, "hub")
    assert list((tmp_path / "fresh").glob(".tmp-fetched-*"))
    checkpointer.save(1, parts(1))
    assert listed(tmp_path / "fresh") == ["checkpoint-1"]


def test_two_ranks_restore_what_one_of_them_downloads(hub, tmp_path):
    pushed(hub, tmp_path / "out")
    run(2, ckpt_hub.restore, str(tmp_path / "fresh"), hub.endpoint, "hub:ci/run")
    assert sum(path.endswith("/extra.safetensors") for method, path in hub.log if method == "GET") == 1
    assert list((tmp_path / "fresh").iterdir()) == []


def test_another_rank_hears_of_it_when_the_download_fails(tmp_path):
    answers = iter([lambda value: [(None, Failure("CheckpointError: no checkpoint at X")), value]])
    other = Checkpointer(tmp_path, rank=1, world_size=2, gather_objects=lambda value: next(answers)(value))
    with pytest.raises(CheckpointError, match="hub:ci/run was not restored: rank 0: CheckpointError: no checkpoint at"):
        other.restore(parts(), "hub:ci/run")


def test_a_snapshot_that_the_client_itself_downloaded_is_restored_and_links_elsewhere_are_not(hub, tmp_path):
    from huggingface_hub import HfApi

    pushed(hub, tmp_path / "out")
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    snapshot = api.snapshot_download("ci/run", cache_dir=tmp_path / "cache")
    checkpoint = tmp_path / "cache" / os.path.relpath(snapshot, tmp_path / "cache") / "last-checkpoint"
    link = checkpoint / "extra.safetensors"
    assert link.is_symlink()  # as the client does it
    assert restored(tmp_path / "fresh", checkpoint) == (2, 2)
    elsewhere = tmp_path / "blobs" / "same"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(link.read_bytes())
    link.unlink()
    link.symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpointError, match="extra.safetensors is a link, which may lead anywhere"):
        Checkpointer(tmp_path / "fresh").restore(parts(), checkpoint)


def test_a_folder_named_hub_is_reached_by_its_path(tmp_path):
    Checkpointer(tmp_path / "hub").save(3, parts(3))
    former = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert Checkpointer(tmp_path / "run").restore(parts(), "./hub") == 3
    finally:
        os.chdir(former)
    assert not resume.is_address(tmp_path / "hub")
    assert not resume.is_address("hubs")


def test_without_a_token_the_owner_is_asked_for_once(hub, tmp_path, caplog):
    with pytest.raises(CheckpointError, match="give hub:OWNER/NAME.*no token found"):
        reading(hub, tmp_path / "fresh", repo_id="run", token=None).restore(parts(), "hub")
    assert "trying again" not in caplog.text
