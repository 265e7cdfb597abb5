"""What a Hub lists and answers is checked before anything is asked for or made under its names."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from ckpt_hub import Run
from ckpt_parts import number_of, parts
from minihub import TOKEN

from tr_ckpt import Checkpointer, CheckpointError, HubRepository
from tr_ckpt.hub import resume

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

HOSTILE = (
    "last-checkpoint/../../../x", "last-checkpoint/a/../../../../x", "last-checkpoint//x", "last-checkpoint/sub\\..\\x",
    "last-checkpoint/C:x", "last-checkpoint/nul", "last-checkpoint/x.", "last-checkpoint/\x1b]0;x\x07",
    "last-checkpoint/Model.json", "last-checkpoint/model.json/x",
)  # fmt: skip


class LiteralApi:
    """A client that obeys the listing to the letter, as huggingface_hub 0.23 to 0.36 did."""

    endpoint = "http://127.0.0.1:9"

    def __init__(self, files, sha="0" * 40, name="ci"):
        self.files, self.sha, self.name, self.asked = files, sha, name, []

    def whoami(self):
        return {"name": self.name}

    def repo_info(self, repo_id, revision):
        return SimpleNamespace(sha=self.sha)

    def list_repo_tree(self, repo_id, revision, recursive):
        return (SimpleNamespace(path=path, size=len(content)) for path, content in self.files.items())

    def list_repo_commits(self, repo_id, revision):
        return []

    def snapshot_download(self, repo_id, *, revision, allow_patterns, local_dir, tqdm_class):
        from huggingface_hub.utils import filter_repo_objects

        for path in filter_repo_objects(self.files, allow_patterns=allow_patterns):
            self.asked.append(path)
            place = Path(os.path.normpath(f"{local_dir}/{path}"))  # opens what lies outside, too
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(self.files[path])


@pytest.fixture
def files(tmp_path):
    """The files of a checkpoint of step 2, as a repository holds them."""
    folder = Checkpointer(tmp_path / "saved").save(2, parts(2))
    return {f"last-checkpoint/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def world(tmp_path):
    """A folder deep enough that what is written outside is seen."""
    run = tmp_path / "world" / "a" / "b" / "run"
    run.mkdir(parents=True)
    yield run
    outside = {path for path in (tmp_path / "world").rglob("*") if path.is_file() and run not in path.parents}
    assert outside == set()


def restore(run, api, source="hub:ci/run"):
    name = "ci/run" if source != "hub" else "run"
    repository = HubRepository(name, token=TOKEN, endpoint="http://127.0.0.1:9", retry_delays_s=())
    repository._api = api
    into = parts()
    step = Checkpointer(run, hub=lambda: repository).restore(into, "hub")
    return step, number_of(into)


def test_the_client_of_these_tests_gives_what_is_asked_for(files, world):
    assert restore(world, LiteralApi(files)) == (2, 2)
    assert restore(world, LiteralApi({**files, "last-checkpoint/x[1]*?.json": b""})) == (2, 2)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_in_a_listing_is_refused_before_it_is_asked_for(name, files, world):
    api = LiteralApi({**files, name: b"written"})
    with pytest.raises(CheckpointError, match="nothing of it is downloaded: its listing names"):
        restore(world, api)
    assert api.asked == ["last-checkpoint/manifest.json"]


@pytest.mark.parametrize("name", HOSTILE[:-2])
def test_a_hostile_name_in_what_another_program_saved_is_refused_too(name, world):
    api = LiteralApi({"last-checkpoint/trainer_state.json": b"{}", name: b"written"})
    with pytest.raises(CheckpointError, match="its listing names") as caught:
        restore(world, api)
    assert api.asked == []
    assert str(caught.value).isprintable()


def test_a_listing_that_changes_once_it_was_checked_brings_nothing_else(files, world):
    api = LiteralApi(files)
    listed = api.list_repo_tree

    def once(*given, **more):
        found = list(listed(*given, **more))
        api.files = {**files, "last-checkpoint/../../../x": b"written", "last-checkpoint/more.json": b"{}"}
        return found

    api.list_repo_tree = once
    assert restore(world, api) == (2, 2)
    assert set(api.asked) == set(files)


@pytest.mark.parametrize("kind", ["link", "folder", "surplus", "linked folder"])
def test_what_came_is_looked_at_before_it_is_read(kind, files, world, tmp_path):
    api = LiteralApi({**files, "last-checkpoint/sub/x.json": b"{}"})
    given = api.snapshot_download
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "x.json").write_bytes(b"{}")

    def otherwise(repo_id, *, local_dir, **more):
        given(repo_id, local_dir=local_dir, **more)
        folder = Path(local_dir) / "last-checkpoint"
        if (folder / "sub").is_dir():
            if kind != "surplus":
                (folder / "sub" / "x.json").unlink()
            if kind == "link":
                (folder / "sub" / "x.json").symlink_to(tmp_path / "secret" / "x.json")
            elif kind == "folder":
                (folder / "sub" / "x.json").mkdir()
            elif kind == "surplus":
                (folder / "more.bin").write_bytes(b"x")
            else:
                (folder / "sub").rmdir()
                (folder / "sub").symlink_to(tmp_path / "secret")

    api.snapshot_download = otherwise
    message = "is a link, which may lead|is not a plain file|'last-checkpoint/more.bin' came with .* was not asked for"
    with pytest.raises(CheckpointError, match=message):
        restore(world, api)


@pytest.mark.parametrize("sha", ["../../../x", "main", "", "A" * 40, "0" * 41 + "/x", None, 7, "0" * 65])
def test_what_is_no_commit_is_refused_before_a_folder_is_named_by_it(sha, files, world):
    with pytest.raises(CheckpointError, match="the Hub calls its commit .*, which is none"):
        restore(world, LiteralApi(files, sha=sha))
    assert list(world.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "\x1b[31m", "", None])
def test_an_owner_who_cannot_be_one_is_refused(name, files, world):
    with pytest.raises(CheckpointError, match="names an owner who cannot be one") as caught:
        restore(world, LiteralApi(files, name=name), source="hub")
    assert str(caught.value).isprintable()


def test_a_listing_without_end_is_refused(files, world, monkeypatch):
    monkeypatch.setattr(resume, "MOST_ENTRIES", 1000)
    api = LiteralApi(files)

    def endless(*_, **__):
        number = 0
        while True:
            number += 1
            yield SimpleNamespace(path=f"x{number}", size=1)

    api.list_repo_tree = endless
    with pytest.raises(CheckpointError, match="it lists more than 1,000 files"):
        restore(world, api)


def test_a_list_of_commits_that_is_none_leaves_out_the_hint_alone(files, world):
    api = LiteralApi({**files, "last-checkpoint/manifest.json": b"{"})
    for commits in ([SimpleNamespace()] * 3, None, [SimpleNamespace(commit_id="$(x)", title=1)] * 3):
        api.list_repo_commits = lambda repo_id, revision, held=commits: held
        with pytest.raises(CheckpointError, match="no valid checkpoint at") as caught:
            restore(world, api)
        assert "resume from an earlier commit" not in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE[:3])
def test_the_hub_itself_may_list_what_it_likes(name, hub, world, tmp_path):
    """With the client that is installed, over HTTP."""
    run = Run(tmp_path / "out", hub, strategy="checkpoint", always_push=True)
    run.push(2)
    hub.replace("ci/run", name, b"written")
    own = HubRepository("ci/run", token=TOKEN, endpoint=hub.endpoint, retry_delays_s=())
    with pytest.raises(CheckpointError, match=re.escape("nothing of it is downloaded: its listing names")):
        Checkpointer(world, hub=lambda: own).restore(parts(), "hub")
    assert not any(name.rpartition("/")[2] == path.rpartition("/")[2] for _, path in hub.log)


def test_more_files_than_the_client_is_asked_for_at_once_all_come(files, world, monkeypatch):
    monkeypatch.setattr(resume, "_AT_ONCE", 2)
    assert restore(world, LiteralApi(files)) == (2, 2)


def test_a_client_that_fails_on_long_paths_is_named(files, world):
    api = LiteralApi(files)

    def fail(*given, **more):
        raise FileNotFoundError(2, "No such file or directory", "\\\\?\\/home/someone/run")

    api.snapshot_download = fail
    with pytest.raises(CheckpointError, match="0.34 to 1.0.0 cannot write .* give a shorter output_dir"):
        restore(world, api)
