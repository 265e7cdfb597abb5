"""`trainer ckpt` with runs of the Trainer, of transformers' Trainer, and with `from_pretrained`."""

import json
import re

import pytest
import torch
import transformers
from shared.commands import command

from tr_core import Trainer, TrainingArguments

ckpt = command("ckpt")
SIZES = {
    "vocab_size": 64,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

OPTIONS = {
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "logging_steps": 2,
    "disable_tqdm": True,
    "report_to": "none",
    "use_cpu": True,
}


def rows():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (24, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def network():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))


@pytest.fixture(autouse=True)
def any_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    torch.set_num_threads(1)


@pytest.fixture
def ours(tmp_path):
    """A folder of our Trainer, and the model it ended with."""
    args = TrainingArguments(output_dir=str(tmp_path / "ours"), log_level="error", **OPTIONS)
    trainer = Trainer(network(), args, train_dataset=rows(), eval_dataset=rows()[:8])
    trainer.train()
    trainer.save_state()  # puts a trainer_state.json beside the checkpoints
    return tmp_path / "ours", trainer.model


@pytest.fixture
def theirs(tmp_path):
    """A folder of transformers' Trainer, and the model it ended with."""
    args = transformers.TrainingArguments(output_dir=str(tmp_path / "theirs"), **OPTIONS)
    trainer = transformers.Trainer(network(), args, train_dataset=rows(), eval_dataset=rows()[:8])
    trainer.train()
    return tmp_path / "theirs", trainer.model


def table(output):
    return [re.split(r"\s{2,}", line) for line in output.split("\n\n")[0].splitlines()]


def test_a_run_s_checkpoints_are_listed_with_their_losses(ours, capsys):
    folder, _ = ours
    capsys.readouterr()
    assert ckpt(["verify", str(folder)]) == 0
    heading, first, second = table(capsys.readouterr().out)
    assert heading == ["checkpoint", "step", "size", "ranks", "saved at (UTC)", "eval_loss", "mark", "condition"]
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    losses = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    assert [first[5], second[5]] == [f"{loss:.5g}" for loss in losses]
    assert first[-1] == second[-1] == "verified"
    assert "newest" in second


def test_an_exported_model_is_what_from_pretrained_loads(ours, tmp_path, capsys):
    folder, trained = ours
    assert ckpt(["export", str(folder), str(tmp_path / "model")]) == 0
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"), trained, torch.float32)


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_exported_model_in_another_dtype_and_in_shards_loads_as_such(ours, tmp_path, word, dtype, capsys):
    folder, trained = ours
    words = ["--dtype", word, "--max-shard-size", "5kB"]
    assert ckpt(["export", str(folder), str(tmp_path / "model"), *words]) == 0
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) > 2
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"), trained, dtype)


def assert_same(loaded, trained, dtype):
    ours, theirs = loaded.state_dict(), trained.state_dict()
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == dtype, name
        assert torch.equal(ours[name], tensor.to(dtype)), name


def test_a_run_of_transformers_trainer_is_listed_as_another_program_s(theirs, capsys):
    folder, _ = theirs
    capsys.readouterr()
    assert ckpt(["ls", str(folder)]) == 0
    output = capsys.readouterr().out
    heading, first, second = table(output)
    assert "eval_loss" in heading
    assert first[0] == "checkpoint-2"
    assert first[-1] == second[-1] == "foreign"
    assert "checkpoint-4: it was written by another program, as transformers' Trainer writes them" in output


def test_an_imported_checkpoint_is_one_of_ours_and_exports_the_same_model(theirs, tmp_path, capsys):
    folder, trained = theirs
    assert ckpt(["import", str(folder / "checkpoint-4"), str(tmp_path / "new")]) == 0
    assert f"{tmp_path / 'new' / 'checkpoint-4'}: step 4, " in capsys.readouterr().out
    assert ckpt(["verify", str(tmp_path / "new")]) == 0
    assert ckpt(["export", str(tmp_path / "new"), str(tmp_path / "model")]) == 0
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"), trained, torch.float32)
    capsys.readouterr()
    assert ckpt(["import", str(folder / "checkpoint-4"), str(tmp_path / "new")]) == 2
    assert "trainer ckpt import: " in capsys.readouterr().err


def test_two_equal_runs_differ_in_their_times_alone(ours, tmp_path, capsys):
    folder, _ = ours
    args = TrainingArguments(output_dir=str(tmp_path / "again"), log_level="error", **OPTIONS)
    Trainer(network(), args, train_dataset=rows(), eval_dataset=rows()[:8]).train()
    times = ["*_runtime", "*_per_second", "*output_dir", "*logging_dir", "*run_name", "*start_s"]
    words = [word for pattern in times for word in ("--ignore", pattern)]
    capsys.readouterr()
    code = ckpt(["diff", str(folder), str(tmp_path / "again"), *words])
    assert code == 0, capsys.readouterr().out


def test_two_steps_of_a_run_differ_in_each_part(ours, capsys):
    folder, _ = ours
    capsys.readouterr()
    assert ckpt(["diff", str(folder / "checkpoint-2"), str(folder / "checkpoint-4"), "--all"]) == 1
    output = capsys.readouterr().out
    assert "  scheduler.last_epoch: 2 -> 4\n" in output
    assert "  trainer_state.global_step: 2 -> 4\n" in output
    assert re.search(r"\nmodel: \d+ of \d+ tensors differ\n", output)
    assert re.search(r"\noptimizer: .* tensors differ\n", output)


def test_the_best_of_a_run_can_be_kept(tmp_path, capsys):
    options = {**OPTIONS, "save_steps": 1, "eval_steps": 1, "learning_rate": 1.0, "metric_for_best_model": "loss"}
    args = TrainingArguments(output_dir=str(tmp_path / "run"), log_level="error", **options)
    trainer = Trainer(network(), args, train_dataset=rows(), eval_dataset=rows()[:8])
    trainer.train()
    best = trainer.state.best_global_step
    assert best not in (None, 4)
    assert ckpt(["prune", str(tmp_path / "run"), "--keep", "1", "--keep-best", "--yes"]) == 0
    assert trainer.checkpointer().steps() == sorted({best, 4})
    capsys.readouterr()
    ckpt(["ls", str(tmp_path / "run")])
    assert {row[0]: row[-2] for row in table(capsys.readouterr().out)[1:]} == {
        f"checkpoint-{best}": "best",
        "checkpoint-4": "newest",
    }
