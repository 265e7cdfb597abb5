"""Trainers of released libraries train to the same numbers on this Trainer as on that of transformers, unedited."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import compared
import pytest
from compared import DROP_IN, logged

PROGRAMS = Path(__file__).with_name("programs.py")
TRL = ["sft", "sft_lora", "dpo", "reward", "kto", "grpo", "rloo"]
OTHERS = ["lora", "setfit", "setfit_torch_head"]
SENTENCES = ["sentences", "sentences_of_two_sets", "cross_encoder"]

pytestmark = pytest.mark.skipif(
    not all(find_spec(name) for name in ("trl", "sentence_transformers", "setfit")),
    reason="needs TRL, sentence-transformers and SetFit",
)


def run(command, folder, name, *more):
    return compared.run(command, PROGRAMS, folder, name, *more)


@pytest.mark.parametrize("name", TRL + SENTENCES + OTHERS)
def test_a_librarys_trainer_logs_the_same_numbers_and_learns_the_same_weights(tmp_path, name):
    theirs = run([sys.executable], tmp_path / "theirs", name)
    ours = run(DROP_IN, tmp_path / "ours", name)
    assert theirs["base"] == "transformers.trainer"
    assert ours["base"] == "tr_core.trainer"
    assert logged(ours) == logged(theirs)
    assert ours["weights"] == theirs["weights"]
    assert ours["more"] == theirs["more"]
    missing = set(theirs["final"]) - set(ours["final"])
    assert missing <= {"training_args.bin"}  # a pickle; ours is training_args.json


@pytest.mark.parametrize("name", ["lora", "sft_lora", "sentences"])
def test_a_librarys_run_resumes_to_the_bit(tmp_path, name):
    whole = run(DROP_IN, tmp_path / "whole", name)
    resumed = run(DROP_IN, tmp_path / "resumed", name, str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed["weights"] == whole["weights"]


def test_a_checkpoint_of_a_sentence_model_loads_as_the_library_loads_it(tmp_path):
    run(DROP_IN, tmp_path / "ours", "sentences")
    load = "from sentence_transformers import SentenceTransformer as S; print(S(sys.argv[1]).encode('a').shape)"
    words = [sys.executable, "-c", f"import sys; {load}", str(tmp_path / "ours" / "checkpoint-4")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "(16,)", done.stderr[-2000:]


def test_an_adapter_that_was_saved_loads_as_peft_loads_it(tmp_path):
    result = run(DROP_IN, tmp_path / "ours", "lora")
    load = (
        "from programs import llama; from peft import PeftModel as P; "
        "model = P.from_pretrained(llama(), sys.argv[1]); "
        "print(json.dumps({key: value.double().sum().item() for key, value in model.state_dict().items()}))"
    )
    for folder in ("final", "checkpoint-4"):
        words = [sys.executable, "-c", f"import json, sys; {load}", str(tmp_path / "ours" / folder)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=PROGRAMS.parent, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout) == result["weights"]


PARSES = """
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

script, args, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
print(script.dataset_name, args.learning_rate, args.max_length, args.seed, model.lora_target_modules)
"""


def test_a_script_of_trl_reads_its_command_line_and_configuration_file(tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "config.yaml"
    script.write_text(PARSES)
    file.write_text(
        "dataset_name: data\nlearning_rate: 2.0e-5\nseed: 3\nlora_target_modules: [a, b]\noutput_dir: out\n"
    )
    words = [str(script), "--config", str(file), "--seed", "5", "--max_length", "7", "--bf16", "false"]
    said = [
        subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        for command in ([sys.executable], DROP_IN)
    ]
    assert [done.stdout for done in said] == ["data 2e-05 7 5 ['a', 'b']\n"] * 2, said[1].stderr[-3000:]
