"""Checkpoints of other programs, written as ours; what their random states and trainer's state become."""

import contextlib
import json
import logging
import random

import ckpt_foreign
import pytest
import torch
from ckpt_faults import Faults, Killed

from tr_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, discovery, hf_import


def test_each_rank_gets_its_own_random_state_and_one_that_has_none_keeps_it(left, tmp_path, caplog):
    (left / "rng_state.pth").unlink()
    for rank in (0, 1):
        random.seed(rank)
        torch.save(ckpt_foreign.random_states(), left / f"rng_state_{rank}.pth")
    checkpoint = hf_import.read(left)
    assert checkpoint.world_size == 2
    for rank in (0, 1):
        assert checkpoint.state("rng", rank)["python"]["words"][1] == random.Random(rank).getstate()[1][1]
    ranks = {"rank": 2, "world_size": 3, "gather_objects": lambda value: [value] * 3}
    random.seed(77)
    before = random.getstate()
    assert Checkpointer(left.parent, **ranks).restore(ckpt_foreign.make(), left) == 3
    assert random.getstate() == before
    assert "rng of rank 2 is not in checkpoint-3; it stays unchanged" in caplog.text
    folder = hf_import.convert(left, tmp_path / "ours")
    described = discovery.check_quickly(discovery.Found(3, folder.name, folder))
    assert described.world_size == 2
    assert {"rng-0.json", "rng-1.json"} <= set(described.parts["rng"])


def test_random_states_of_devices_are_a_list(left):
    one, all_of_them = torch.arange(16).byte(), [torch.zeros(16).byte(), torch.ones(16).byte()]
    for held, expected in ((one, [one]), (all_of_them, all_of_them)):
        torch.save({**ckpt_foreign.random_states(), "cuda": held}, left / "rng_state.pth")
        read = hf_import.read(left).state("rng", 0)["cuda"]
        assert len(read) == len(expected)
        assert all(map(torch.equal, read, expected))
    torch.save({"cpu": torch.get_rng_state()}, left / "rng_state.pth")
    with pytest.raises(DamagedCheckpointError, match=r"rng_state.pth lacks required content: KeyError\('python'\)"):
        Checkpointer(left.parent).restore(ckpt_foreign.make(), left)


def test_numbers_that_json_does_not_have_are_read(tmp_path, run):
    history = [{"loss": float("nan"), "step": 1}, {"loss": float("inf"), "step": 2}]
    left = ckpt_foreign.save(tmp_path, 3, run, log_history=history, best_metric=float("-inf"))
    assert "NaN" in (left / "trainer_state.json").read_text()
    state = hf_import.read(left).states["trainer_state"]
    assert [str(entry["loss"]) for entry in state["log_history"]] == ["nan", "inf"]
    assert state["best_metric"] is None
    folder = hf_import.convert(left, tmp_path / "ours")
    place = ckpt_foreign.Place()
    Checkpointer(tmp_path).restore({"trainer_state": place}, folder)
    assert [str(entry["loss"]) for entry in place.state["log_history"]] == ["nan", "inf"]


def test_the_best_step_of_a_version_that_names_its_folder_only_is_found(tmp_path, run):
    left = ckpt_foreign.save(tmp_path, 3, run, best_metric=0.5, best_model_checkpoint="runs/x/checkpoint-2")
    state = hf_import.read(left).states["trainer_state"]
    assert (state["best_global_step"], state["best_metric"]) == (2, 0.5)


def test_states_of_callbacks_have_the_names_of_ours(tmp_path, run):
    one = {"args": {"patience": 3}, "attributes": {"counter": 1}}
    other = {"args": {}, "attributes": {"counter": 2}}
    saved = {"TrainerControl": {"args": {}, "attributes": {}}, "Stopping": one, "Twice": [one, other]}
    left = ckpt_foreign.save(tmp_path, 3, run, stateful_callbacks=saved)
    read = hf_import.read(left).states["callbacks"]
    assert read == {"Stopping": {"counter": 1}, "Twice": {"counter": 1}, "Twice#2": {"counter": 2}}


def test_a_converted_checkpoint_is_whole_and_goes_on_with_the_same_numbers(left, run, tmp_path):
    (left / "tokenizer.json").write_text("{}")
    (left / "runs").mkdir()
    before = digests_of_files(left)
    folder = hf_import.convert(left, tmp_path / "ours")
    assert digests_of_files(left) == before
    checkpointer = Checkpointer(tmp_path / "ours")
    assert checkpointer.steps() == [3]
    [found] = discovery.find(tmp_path / "ours", "checkpoint")
    described = discovery.check_quickly(found)
    discovery.verify(folder, described)
    assert described.extra_files() == ["config.json", "foreign.json", "tokenizer.json"]
    assert json.loads((folder / "foreign.json").read_text())["program"] == "transformers' Trainer"
    rest = ckpt_foreign.train(run, 4)
    parts = ckpt_foreign.make()
    assert checkpointer.restore(parts) == 3
    assert ckpt_foreign.train(parts, 4) == rest
    assert parts["run"].state == hf_import.read(left).states["run"]


def digests_of_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_checkpoint_of_the_model_alone_is_converted_to_one(left, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (left / file).unlink()
    folder = hf_import.convert(left, tmp_path / "ours")
    assert discovery.check_quickly(discovery.Found(3, folder.name, folder)).parts.keys() == {"model", "trainer_state"}
    assert "checkpoint-3 holds the model only" in caplog.text
    with pytest.raises(CheckpointError, match="it was saved with the model only"):
        Checkpointer(tmp_path / "ours").restore(ckpt_foreign.make())


def test_half_of_a_state_is_not_converted(left, tmp_path):
    (left / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match=r"there is no scheduler.pt in it"):
        hf_import.convert(left, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_nothing_is_written_over(left, tmp_path):
    hf_import.convert(left, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"checkpoint-3 exists; give another folder"):
        hf_import.convert(left, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"checkpoint-3 exists; give another folder"):
        hf_import.convert(left, left.parent)


@pytest.mark.parametrize("mode", ["kill", pytest.param("error", marks=pytest.mark.slow)])
def test_a_conversion_that_fails_at_any_operation_leaves_all_or_nothing(left, tmp_path, mode):
    with Faults() as faults:
        hf_import.convert(left, tmp_path / "whole")
    for number in range(1, len(faults.log) + 1):
        target = tmp_path / f"{mode}-{number}"
        raised = True
        with Faults(number, mode), contextlib.suppress(Killed, OSError):
            hf_import.convert(left, target)
            raised = False
        found = discovery.find(target, "checkpoint")
        assert raised or found  # where only the lock failed
        for each in found:
            discovery.verify(each.path, discovery.check_quickly(each))
        if not found:
            hf_import.convert(left, target)
        assert Checkpointer(target).steps() == [3]


def test_a_folder_of_checkpoints_is_not_converted_and_one_in_it_is_named(tmp_path, left):
    theirs = tmp_path / "run" / "checkpoint-3"
    theirs.parent.mkdir()
    left.rename(theirs)
    with pytest.raises(CheckpointError, match=r"run holds checkpoints; give one of them, such as \S+checkpoint-3$"):
        hf_import.convert(theirs.parent, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_one_of_ours_is_not_converted(tmp_path, left):
    made = hf_import.convert(left, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="checkpoint-3 is one of ours already: there is nothing to convert"):
        hf_import.convert(made, tmp_path / "again")
    assert not (tmp_path / "again").exists()
