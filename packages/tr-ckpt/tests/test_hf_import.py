"""Checkpoints of other programs: gone on with, refused in words, and written as ours."""

import hashlib
import json

import ckpt_foreign
import pytest
import torch
from safetensors.torch import load_file, save_file

from tr_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, hf_import


def restore(left, parts=None):
    return Checkpointer(left.parent.parent / "ours").restore(parts or ckpt_foreign.make(), left)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_run_goes_on_in_another_loop_with_the_same_numbers(left, run):
    rest = ckpt_foreign.train(run, 4)
    parts = ckpt_foreign.make()
    assert restore(left, parts) == 3
    assert parts["model"].last.weight is parts["model"].first.weight
    assert ckpt_foreign.train(parts, 4) == rest
    for name, value in run["model"].state_dict().items():
        assert torch.equal(parts["model"].state_dict()[name], value)


def test_numpys_generator_goes_on(left):
    np = pytest.importorskip("numpy")
    restore(left)
    expected = np.random.random()
    np.random.random(5)
    restore(left)
    assert np.random.random() == expected


def test_what_it_says_is_read_when_it_is_asked_for(left):
    checkpoint = hf_import.read(left)
    (left / "optimizer.pt").write_bytes(b"")
    assert (checkpoint.step, checkpoint.world_size) == (3, 1)
    assert set(checkpoint.parts) == {"model", "optimizer", "scheduler", "rng", "run", "callbacks", "trainer_state"}
    assert set(checkpoint.states["model"]) == {"first.weight", "norm.weight", "norm.bias"}
    assert checkpoint.states["run"]["foreign"]["global_step"] == 3
    with pytest.raises(DamagedCheckpointError, match="optimizer.pt"):
        checkpoint.states["optimizer"]


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_missing_file_is_an_error_that_names_it(left, file):
    (left / file).unlink()
    with pytest.raises(CheckpointError, match=rf"checkpoint-3: there is no {file} in it"):
        restore(left)


def test_the_model_alone_can_be_loaded_without_the_rest(left, run):
    for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (left / file).unlink()
    model = ckpt_foreign.Tied()
    assert restore(left, {"model": model}) == 3
    assert torch.equal(model.first.weight, run["model"].first.weight)


def test_a_part_that_the_other_program_does_not_save_is_an_error_unless_it_is_optional(left):
    parts = {**ckpt_foreign.make(), "ema": ckpt_foreign.Place(), "scaler": ckpt_foreign.Place()}
    checkpointer = Checkpointer(left.parent)
    with pytest.raises(CheckpointError, match="there is no 'ema' in it, as transformers' Trainer saves nothing"):
        checkpointer.restore(parts, left, optional=["scaler"])
    assert checkpointer.restore(parts, left, optional=["scaler", "ema"]) == 3
    with pytest.raises(CheckpointError, match=r"there is no scaler.pt in it"):
        checkpointer.restore({"scaler": parts["scaler"]}, left)


# Which one is taken


def test_the_highest_valid_one_of_a_folder_is_taken(tmp_path, run, caplog):
    for step in (9, 100, 20):
        ckpt_foreign.save(tmp_path, step, run)
    (tmp_path / "checkpoint-100" / "model.safetensors").write_bytes(b"cut")
    assert Checkpointer(tmp_path).restore(ckpt_foreign.make()) == 20
    assert "skipped checkpoint-100: model.safetensors" in caplog.text


def test_a_folder_of_checkpoints_may_hold_a_state_of_its_own(tmp_path, run):
    left = ckpt_foreign.save(tmp_path, 9, run)
    (tmp_path / "trainer_state.json").write_bytes((left / "trainer_state.json").read_bytes())
    assert Checkpointer(tmp_path / "ours").restore(ckpt_foreign.make(), tmp_path) == 9


def test_our_saves_neither_remove_nor_overwrite_it(tmp_path, run):
    theirs = {step: digests(ckpt_foreign.save(tmp_path, step, run)) for step in (3, 6)}
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    for step in (5, 6, 7):
        checkpointer.save(step, run)
    assert checkpointer.steps() == [7]
    assert digests(tmp_path / "checkpoint-3") == theirs[3]
    assert digests(tmp_path / "checkpoint-6.replaced-1") == theirs[6]


def test_one_under_the_name_of_another_step_is_passed_over(tmp_path, run, caplog):
    ckpt_foreign.save(tmp_path, 9, run).rename(tmp_path / "checkpoint-30")
    ckpt_foreign.save(tmp_path, 8, run)
    assert Checkpointer(tmp_path).restore(ckpt_foreign.make()) == 8
    assert "skipped checkpoint-30: it is of step 9" in caplog.text


def test_one_whose_writing_was_interrupted_is_damaged(left):
    (left / "checkpoint-is-incomplete.txt").touch()
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint-3: it holds checkpoint-is-incomplete.txt"):
        restore(left)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"global_step": "3"}', '{"global_step": -1}', "[" * 100_000])
def test_a_state_that_says_of_no_step_is_damage(left, text):
    (left / "trainer_state.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"trainer_state\.json"):
        restore(left)


def test_what_is_no_checkpoint_of_a_known_program_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"is not a checkpoint of a program whose checkpoints can be read \(transformers' Tr"
    ):
        hf_import.read(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pytorch_model_fsdp_0/", "optimizer_0/"], r"FSDP left \(optimizer_0, pytorch_model_fsdp_0\).*merge-weights"),
        (["pytorch_model_fsdp.bin", "optimizer.bin"], r"FSDP left \(optimizer.bin, pytorch_model_fsdp.bin\)"),
        (
            ["global_step3/", "zero_to_fp32.py", "latest"],
            r"DeepSpeed left \(global_step3, zero_to_fp32.py\).*python ch",
        ),
        (["rank0-of-8-optimizer.pt"], r"XLA or SageMaker left \(rank0-of-8-optimizer.pt\).*whole"),
    ],
)
def test_a_state_in_pieces_is_refused_with_what_joins_them(left, names, message):
    for name in names:
        (left / name).mkdir() if name.endswith("/") else (left / name).touch()
    with pytest.raises(CheckpointError, match=message):
        restore(left)


# What fits


def test_weights_in_several_files_are_put_together(left, run):
    weights = load_file(left / "model.safetensors")
    (left / "model.safetensors").unlink()
    names = sorted(weights)
    save_file({names[0]: weights[names[0]]}, left / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in names[1:]}, left / "model-00002-of-00002.safetensors")
    placed = {name: f"model-0000{1 if name == names[0] else 2}-of-00002.safetensors" for name in names}
    index = left / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    model = ckpt_foreign.Tied()
    restore(left, {"model": model})
    assert torch.equal(model.first.weight, run["model"].first.weight)

    index.write_text(json.dumps({"weight_map": {**placed, "more": placed[names[0]]}}))
    with pytest.raises(DamagedCheckpointError, match="model-00001-of-00002.safetensors lacks 'more'"):
        restore(left, {"model": model})
    (left / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match="model-00002-of-00002.safetensors is missing"):
        restore(left, {"model": model})
    index.write_text(json.dumps({"weight_map": {"first.weight": "../checkpoint-3/model.safetensors"}}))
    with pytest.raises(DamagedCheckpointError, match="leads elsewhere"):
        restore(left, {"model": model})


def test_weights_in_a_pickle_are_read_with_those_that_are_tied(left, run):
    (left / "model.safetensors").unlink()
    torch.save(run["model"].state_dict(), left / "pytorch_model.bin")
    model = ckpt_foreign.Tied()
    restore(left, {"model": model})
    assert torch.equal(model.last.weight, run["model"].first.weight)
    torch.save({"first.weight": 1}, left / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin holds more than tensors by name"):
        restore(left, {"model": model})


def test_no_weights_at_all_are_an_error(left):
    (left / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"there are no weights in it: none of model.safetensors"):
        restore(left)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("norm.bias"), "the weights lack norm.bias of Tied"),
        (lambda weights: weights.update(more=torch.zeros(1)), "the weights hold more, which Tied does not have"),
        (lambda weights: weights.update({"norm.bias": torch.zeros(5)}), "size mismatch for norm.bias"),
    ],
)
def test_weights_of_another_model_are_refused(left, change, message):
    weights = load_file(left / "model.safetensors")
    change(weights)
    save_file(weights, left / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        restore(left)


def test_buffers_that_are_computed_now_and_weights_that_are_never_saved_make_no_difference(left):
    weights = load_file(left / "model.safetensors")
    save_file({**weights, "embeddings.position_ids": torch.arange(3)}, left / "model.safetensors")
    assert restore(left) == 3
    weights.pop("norm.bias")
    save_file(weights, left / "model.safetensors")
    model = ckpt_foreign.Tied()
    model._keys_to_ignore_on_save = [r"norm\.bias"]
    with torch.no_grad():
        model.norm.bias.fill_(7.0)
    assert restore(left, {"model": model}) == 3
    assert model.norm.bias.tolist() == [7.0] * 4


def test_an_optimizer_with_other_parameters_is_refused(left):
    parts = ckpt_foreign.make()
    parts["optimizer"] = torch.optim.AdamW(parts["model"].parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"saved with groups of 1 and 2 parameters, this run's are of 3"):
        restore(left, {"optimizer": parts["optimizer"]})
    groups = [
        {"params": [parts["model"].norm.weight]},
        {"params": [parts["model"].first.weight, parts["model"].norm.bias]},
    ]
    with pytest.raises(CheckpointError, match=r"exp_avg of parameter 0 has the shape \(4, 4\), and a parameter of sh"):
        restore(left, {"optimizer": torch.optim.AdamW(groups, lr=0.1)})


def test_the_state_of_another_kind_of_optimizer_is_refused(left):
    with pytest.raises(CheckpointError, match="and SGD also has dampening, momentum, nesterov: set optim"):
        restore(left, {"optimizer": ckpt_foreign.make("sgd")["optimizer"]})
    torch.save({"weights": 1}, left / "optimizer.pt")
    with pytest.raises(CheckpointError, match="the optimizer's state has no param_groups"):
        restore(left)
    torch.save([1], left / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer.pt holds a list and not a state by name"):
        restore(left)


def test_a_state_of_an_earlier_torch_is_taken_over(left):
    state = torch.load(left / "optimizer.pt", weights_only=True)
    for group in state["param_groups"]:
        group.pop("decoupled_weight_decay", None)
    torch.save(state, left / "optimizer.pt")
    schedule = torch.load(left / "scheduler.pt", weights_only=True)
    schedule.pop("_is_initial", None)
    torch.save({**schedule, "verbose": False}, left / "scheduler.pt")
    parts = ckpt_foreign.make()
    assert restore(left, parts) == 3
    assert parts["scheduler"].last_epoch == 3
    assert hasattr(parts["scheduler"], "verbose") == hasattr(ckpt_foreign.make()["scheduler"], "verbose")


def test_the_state_of_another_schedule_is_refused(left):
    parts = ckpt_foreign.make()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(parts["optimizer"])
    with pytest.raises(CheckpointError, match="this run's ReduceLROnPlateau also has .*best.*: set lr_scheduler_type"):
        restore(left, {"scheduler": plateau})
    one_group = torch.optim.SGD(parts["model"].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(one_group, lambda step: 1.0)
    with pytest.raises(CheckpointError, match=r"saved for 2 parameter groups \(base_lrs\), and this run has 1"):
        restore(left, {"scheduler": schedule})
