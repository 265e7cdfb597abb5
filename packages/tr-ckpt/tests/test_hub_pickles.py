"""Malicious pickles in the files of a checkpoint on the Hub: nothing of them is executed."""

import pickle

import ckpt_foreign
import pytest
import torch
from ckpt_foreign import Payload
from ckpt_malice import vouched, write_configuration
from ckpt_parts import listed, number_of, parts
from minihub import TOKEN, Blob, Repository

from tr_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, HubRepository, RNGState

# The client's own way of sending a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning")

OURS = [
    "config.json", "extra.json", "extra.safetensors", "manifest.json", "model.json", "model.safetensors", "rng-0.json",
    "rng-0.safetensors",
]  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """A checkpoint, to be changed and committed."""
    folder = Checkpointer(tmp_path / "out").save(1, {**parts(1), "rng": RNGState()}, write_extra=write_configuration)
    assert listed(folder) == OURS
    return folder


def restore(hub, fresh, folder, into):
    """Commit a folder as the last checkpoint of a run, and go on from it on a fresh machine."""
    repository = hub.repositories["ci/run"] = Repository("ci/run", private=False)
    repository.commit(
        "main", "evil", {f"last-checkpoint/{path.name}": Blob(path.read_bytes()) for path in folder.iterdir()}
    )
    own = HubRepository("ci/run", token=TOKEN, endpoint=hub.endpoint, retry_delays_s=())
    return Checkpointer(fresh, hub=lambda: own).restore(into, "hub")


@pytest.mark.parametrize("is_vouched", [False, True])
@pytest.mark.parametrize("file", OURS)
def test_a_pickle_in_the_place_of_any_file_executes_nothing(file, is_vouched, hub, saved, mark, tmp_path):
    torch.save(Payload(mark), saved / file)
    if is_vouched and file != "manifest.json":
        vouched(saved)
    into = {**parts(), "rng": RNGState()}
    if is_vouched and file == "config.json":  # which a restore does not read
        assert restore(hub, tmp_path / "fresh", saved, into) == 1
        return
    with pytest.raises(CheckpointError, match=file.rpartition(".")[0]) as caught:
        restore(hub, tmp_path / "fresh", saved, into)
    assert is_vouched or isinstance(caught.value, DamagedCheckpointError)
    assert into["model"].number == 0


def test_pickles_beside_the_files_of_a_checkpoint_are_not_read(hub, saved, mark, tmp_path):
    for name in ("optimizer.pt", "pytorch_model.bin", "training_args.bin", "rng_state.pth", "model.pkl"):
        (saved / name).write_bytes(pickle.dumps(Payload(mark)))
    into = parts()
    assert restore(hub, tmp_path / "fresh", saved, into) == 1
    assert number_of(into) == 1


def test_a_checkpoint_of_another_program_is_gone_on_with_and_a_pickle_in_it_executes_nothing(
    hub, left, run, mark, tmp_path
):
    into = ckpt_foreign.make()
    assert restore(hub, tmp_path / "fresh", left, into) == 3
    for name, value in run["model"].state_dict().items():
        assert torch.equal(value, into["model"].state_dict()[name])
    for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        whole = (left / file).read_bytes()
        torch.save(Payload(mark), left / file)
        with pytest.raises(CheckpointError, match=f"last-checkpoint: {file} "):
            restore(hub, tmp_path / "fresh", left, ckpt_foreign.make())
        (left / file).write_bytes(whole)
