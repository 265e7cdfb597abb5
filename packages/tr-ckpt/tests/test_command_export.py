"""`trainer ckpt export` writes a model folder; `import` makes a checkpoint of another program's."""

import json

import pytest
import torch
from ckpt_faults import forget_temporaries
from ckpt_parts import State, flip, save
from safetensors.torch import load_file

from tr_ckpt import Checkpointer, files, staging
from tr_ckpt.command import main


@pytest.fixture
def run(tmp_path):
    for step in (5, 10):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_model_of_the_newest_is_exported_with_what_lies_beside_it(run, tmp_path, capsys):
    target = tmp_path / "model"
    assert main(["export", str(run), str(target)]) == 0
    assert names(target) == ["config.json", "model.safetensors"]
    exported = load_file(target / "model.safetensors")
    assert torch.equal(exported["weight"], torch.full((3, 4), 10.0))
    assert set(exported) == {"weight", "bias"}
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"{target}: model of checkpoint-10, step 10"
    assert [line.split()[0] for line in rest] == ["config.json", "model.safetensors"]
    assert names(tmp_path) == ["model", "run"]


def test_one_checkpoint_can_be_named(run, tmp_path):
    assert main(["export", str(run / "checkpoint-5"), str(tmp_path / "model")]) == 0
    assert load_file(tmp_path / "model" / "model.safetensors")["weight"][0, 0] == 5


@pytest.mark.parametrize(
    ("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_floating_point_weights_are_converted_and_the_configuration_says_so(tmp_path, word, dtype):
    part = State(weight=torch.tensor([1.0, 2.5]), ids=torch.arange(3), half=torch.ones(2).half())
    nested = {"torch_dtype": "float16", "text": {"dtype": "float32"}, "dtype": None, "layers": 2}
    Checkpointer(tmp_path / "run").save(
        1, {"model": part}, write_extra=lambda folder: (folder / "config.json").write_text(json.dumps(nested))
    )
    target = tmp_path / "model"
    assert main(["export", str(tmp_path / "run"), str(target), "--dtype", word]) == 0
    exported = load_file(target / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in exported.items()} == {
        "weight": dtype,
        "ids": torch.int64,
        "half": dtype,
    }
    assert torch.equal(exported["weight"], torch.tensor([1.0, 2.5]).to(dtype))
    name = str(dtype).removeprefix("torch.")
    expected = {"torch_dtype": name, "text": {"dtype": name}, "dtype": None, "layers": 2}
    assert json.loads((target / "config.json").read_text()) == expected


def test_a_weight_that_would_become_infinite_is_refused(tmp_path, capsys):
    Checkpointer(tmp_path / "run").save(1, {"model": State(big=torch.tensor([1.0, -70_000.0]))})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--dtype", "fp16"]) == 2
    expected = "big holds 7e+04, and the largest number of float16 is 6.55e+04; give bfloat16, which reaches as far as"
    assert f"trainer ckpt export: {expected} float32\n" == capsys.readouterr().err
    assert names(tmp_path) == ["run"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--dtype", "bf16"]) == 0


def test_one_that_is_infinite_already_stays_so(tmp_path):
    Checkpointer(tmp_path / "run").save(1, {"model": State(x=torch.tensor([float("inf"), float("nan"), 1.0]))})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--dtype", "fp16"]) == 0
    exported = load_file(tmp_path / "model" / "model.safetensors")["x"]
    assert exported[0].isinf()
    assert exported[1].isnan()


def test_large_models_are_split(tmp_path, capsys):
    state = {f"layer{index}": torch.full((100,), float(index)) for index in range(5)}
    Checkpointer(tmp_path / "run").save(1, {"model": State(**state)})
    target = tmp_path / "model"
    assert main(["export", str(tmp_path / "run"), str(target), "--max-shard-size", "0.8kB"]) == 0
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert names(target) == [*files, "model.safetensors.index.json"]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    for name, tensor in state.items():
        assert torch.equal(load_file(target / index["weight_map"][name])[name], tensor)
    assert "It holds no config.json: from_pretrained needs one" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["", "0", "5 apples", "GB", "-1GB"])
def test_a_size_must_be_one(run, tmp_path, size, capsys):
    with pytest.raises(SystemExit) as left:
        main(["export", str(run), str(tmp_path / "model"), f"--max-shard-size={size}"])
    assert left.value.code == 2
    assert "is not a size; give one such as 500MB or 5GB" in capsys.readouterr().err


def test_another_part_can_be_exported(tmp_path, trainer_ckpt):
    parts = {"model": State(x=torch.zeros(2)), "ema": State(x=torch.ones(2))}
    Checkpointer(tmp_path / "run").save(1, parts)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--part", "ema"]) == 0
    assert load_file(tmp_path / "model" / "model.safetensors")["x"].sum() == 2
    assert (
        "there is no 'emma' in it, only ema, model"
        in trainer_ckpt("export", tmp_path / "run", tmp_path / "other", "--part", "emma", code=2).err
    )


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path, trainer_ckpt):
    flip(run / "checkpoint-10" / "model.safetensors")
    error = trainer_ckpt("export", run, tmp_path / "model", code=2).err
    assert "checkpoint-10: model.safetensors was changed after it was written" in error
    assert "`trainer ckpt verify` tells which other one is whole" in error
    assert names(tmp_path) == ["run"]


def test_a_target_that_is_there_is_left_alone(run, tmp_path, capsys):
    target = tmp_path / "model"
    target.mkdir()
    (target / "mine").touch()
    assert main(["export", str(run), str(target)]) == 2
    expected = f"trainer ckpt export: {target} exists; give another folder, or --overwrite to replace it\n"
    assert capsys.readouterr().err == expected
    assert names(target) == ["mine"]


def test_a_model_folder_is_replaced_when_that_is_asked_for(run, tmp_path):
    target = tmp_path / "model"
    for step in (5, 10):
        assert main(["export", str(run / f"checkpoint-{step}"), str(target), "--overwrite"]) == 0
        assert load_file(target / "model.safetensors")["weight"][0, 0] == step
    assert names(tmp_path) == ["model", "run"]


def test_only_a_model_folder_is_replaced(run, tmp_path, trainer_ckpt):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").touch()
    (tmp_path / "link").symlink_to(run)
    reasons = {
        mine: "it is not a model folder",
        run: "it holds checkpoint-10",
        run / "checkpoint-5": "it holds manifest.json",
        tmp_path / "link": "it holds checkpoint-10",
    }
    for target, reason in reasons.items():
        before = names(target)
        assert trainer_ckpt("export", run, target, "--overwrite", code=2).err.startswith(
            f"trainer ckpt export: {target} is not replaced: {reason[:14]}"
        )
        assert names(target) == before


def test_when_the_new_folder_cannot_take_its_place_the_old_one_stays(run, tmp_path, capsys, monkeypatch):
    target = tmp_path / "model"
    assert main(["export", str(run / "checkpoint-5"), str(target)]) == 0
    original = files.rename

    def rename(source, place):
        if place == target and source.name.startswith(".tmp-writing"):
            raise OSError(5, "Input/output error")
        original(source, place)

    monkeypatch.setattr(files, "rename", rename)
    assert main(["export", str(run), str(target), "--overwrite"]) == 2
    assert load_file(target / "model.safetensors")["weight"][0, 0] == 5
    assert names(tmp_path) == ["model", "run"]


def test_what_is_no_checkpoint_of_another_program_is_refused_in_words(run, tmp_path, capsys):
    assert main(["import", str(run), str(tmp_path / "new")]) == 2
    expected = f"trainer ckpt import: {run} is not a checkpoint of a program whose checkpoints can be read"
    assert capsys.readouterr().err.startswith(expected)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [[], ["--overwrite"]])
def test_what_a_killed_export_left_is_cleared_away_by_the_next(run, tmp_path, monkeypatch, words):
    target = tmp_path / "model"
    if words:
        assert main(["export", str(run / "checkpoint-5"), str(target)]) == 0
    with monkeypatch.context() as killed:
        killed.setattr(staging, "discard", lambda folder: None)
        killed.setattr(files, "rename", interrupt)
        assert main(["export", str(run), str(target), *words]) == 130
    assert len(list(tmp_path.glob(".tmp-*"))) == 1
    assert main(["export", str(run), str(target), *words]) == 0
    assert names(tmp_path) == ["model", "run"]
    assert load_file(target / "model.safetensors")["weight"][0, 0] == 10


def test_what_a_killed_export_had_moved_aside_goes_when_its_place_is_filled(run, tmp_path, monkeypatch):
    target = tmp_path / "model"
    assert main(["export", str(run / "checkpoint-5"), str(target)]) == 0
    rename, done = files.rename, []

    def die_when_it_is_aside(source, target):
        rename(source, target)
        done.append(target.name)
        if target.name.startswith(".tmp-removed"):
            raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(staging, "discard", lambda folder: None)
        killed.setattr(files, "rename", die_when_it_is_aside)
        assert main(["export", str(run), str(target), "--overwrite"]) == 130
    assert done[-1].startswith(".tmp-removed-model@")
    forget_temporaries()  # as in another process
    assert main(["export", str(run), str(target), "--overwrite"]) == 0
    assert names(tmp_path) == ["model", "run"]


def interrupt(source, target):
    raise KeyboardInterrupt
