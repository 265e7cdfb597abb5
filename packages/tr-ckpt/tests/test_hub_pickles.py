"""Malicious pickles in the files of a checkpoint on the Hub: nothing of them is executed."""

import hashlib
import json
import pickle

import ckpt_foreign
import pytest
import torch
from ckpt_foreign import Payload
from ckpt_hub import Run
from ckpt_parts import number_of, parts
from minihub import TOKEN, Blob

from tr_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, HubRepository, RNGState

# The client's own way of sending a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning")

OURS = [
    "config.json",
    "extra.json",
    "extra.safetensors",
    "manifest.json",
    "model.json",
    "model.safetensors",
    "rng-0.json",
    "rng-0.safetensors",
]


@pytest.fixture
def mark(tmp_path):
    """A folder that exists once something was executed."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def pushed(hub, tmp_path):
    """The files of a checkpoint that was pushed, as they are at the Hub; to be changed."""
    run = Run(tmp_path / "out", hub, strategy="checkpoint")
    run.save(1, rng=RNGState())
    run.settle()
    repository = hub.repositories["ci/run"]
    tree = repository.commits[repository.branches["main"]].tree
    files = {path.removeprefix("last-checkpoint/"): blob.content for path, blob in tree.items() if "/" in path}
    assert sorted(files) == OURS
    return files


def restore(hub, folder, files, into):
    """Commit `files` as the checkpoint, and go on from it on a fresh machine."""
    repository = hub.repositories["ci/run"]
    repository.commit("main", "evil", {f"last-checkpoint/{path}": Blob(content) for path, content in files.items()})
    own = HubRepository("ci/run", token=TOKEN, endpoint=hub.endpoint, retry_delays_s=())
    return Checkpointer(folder, hub=lambda: own).restore(into, "hub")


def fitting(files):
    """Give files a manifest that says that they are as they should be."""
    content = json.loads(files["manifest.json"])
    for name in content["files"]:
        content["files"][name] = {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
    content["manifest_sha256"] = "0" * 64
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    files["manifest.json"] = text.replace('"manifest_sha256": "' + "0" * 64, f'"manifest_sha256": "{digest}').encode()


def saved_by_torch(value, path):
    torch.save(value, path)
    return path.read_bytes()


@pytest.mark.parametrize("is_fitting", [False, True])
@pytest.mark.parametrize("form", ["pickle", "torch"])
@pytest.mark.parametrize("file", OURS)
def test_a_pickle_in_the_place_of_any_file_executes_nothing(file, form, is_fitting, hub, pushed, mark, tmp_path):
    payload = Payload(mark)
    pushed[file] = pickle.dumps(payload) if form == "pickle" else saved_by_torch(payload, tmp_path / "x.pt")
    if is_fitting and file != "manifest.json":
        fitting(pushed)
    into = {**parts(), "rng": RNGState()}
    if is_fitting and file == "config.json":  # which a restore does not read
        assert restore(hub, tmp_path / "fresh", pushed, into) == 1
        return
    with pytest.raises(CheckpointError, match=file.rpartition(".")[0]) as caught:
        restore(hub, tmp_path / "fresh", pushed, into)
    assert is_fitting or isinstance(caught.value, DamagedCheckpointError)
    assert into["model"].number == 0


def test_pickles_beside_the_files_of_a_checkpoint_are_not_read(hub, pushed, mark, tmp_path):
    for name in ("optimizer.pt", "pytorch_model.bin", "training_args.bin", "rng_state.pth", "model.pkl"):
        pushed[name] = pickle.dumps(Payload(mark))
    into = parts()
    assert restore(hub, tmp_path / "fresh", pushed, into) == 1
    assert number_of(into) == 1


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_in_a_checkpoint_of_another_program_executes_nothing(file, hub, pushed, mark, tmp_path):
    made = ckpt_foreign.make()
    ckpt_foreign.train(made, 3)
    left = ckpt_foreign.save(tmp_path / "theirs", 3, made)
    torch.save(Payload(mark), left / file)
    files = {path.name: path.read_bytes() for path in left.iterdir()}
    with pytest.raises(CheckpointError, match=f"last-checkpoint: {file} "):
        restore(hub, tmp_path / "fresh", files, ckpt_foreign.make())


def test_a_checkpoint_of_another_program_is_gone_on_with(hub, pushed, tmp_path):
    made = ckpt_foreign.make()
    ckpt_foreign.train(made, 3)
    left = ckpt_foreign.save(tmp_path / "theirs", 3, made)
    files = {path.name: path.read_bytes() for path in left.iterdir()}
    into = ckpt_foreign.make()
    assert restore(hub, tmp_path / "fresh", files, into) == 3
    for name, value in made["model"].state_dict().items():
        assert torch.equal(value, into["model"].state_dict()[name])
