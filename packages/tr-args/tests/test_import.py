"""Importing and building cost little: no torch, no device, no random number."""

import subprocess
import sys
from pathlib import Path

import tr_args
from tr_args import TrainingArguments

CODE = """
import random, sys
state = random.getstate()
import tr_args
args = tr_args.Seq2SeqTrainingArguments("out", seed=1, bf16=True, fsdp="full_shard")
args.get_process_log_level(), args.to_json_string(), args.world_size, args.should_save, args.parallel_mode
loaded = {"torch", "transformers", "accelerate", "numpy", "yaml"} & set(sys.modules)
assert not loaded, loaded
assert random.getstate() == state
"""


def test_importing_and_building_imports_no_torch_and_draws_no_random_number():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)


def test_building_creates_no_folder(tmp_path):
    TrainingArguments(str(tmp_path / "out"), logging_dir=str(tmp_path / "logs"))
    assert list(tmp_path.iterdir()) == []


def test_public_names_are_the_frozen_ones():
    frozen = (Path(__file__).parent.parent / "api.txt").read_text().split()
    assert sorted(tr_args.__all__) == frozen
    assert all(hasattr(tr_args, name) for name in frozen)
