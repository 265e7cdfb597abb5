"""`trainer drop-in --compare` on transformers' own Trainer, and the table of its example scripts."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import official_examples

pytestmark = pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")

SCRIPT = """
import sys
import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments
from transformers import set_seed

dropout = float(sys.argv.pop(1))
[args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(args.seed)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
config = BertConfig(vocab_size=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0, **sizes)
rows = [{"input_ids": [n % 32, n * 7 % 32, 3], "labels": n % 2} for n in range(32)]

def noisy(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    noise = torch.randint(0, 3, ids.shape) if dropout else 0
    return {"input_ids": (ids + noise) % 32, "labels": torch.tensor([row["labels"] for row in rows])}

trainer = Trainer(BertForSequenceClassification(config), args, data_collator=noisy, train_dataset=rows)
trainer.train()
trainer.save_model()
"""


RUNS = [(["script.py", "0.0"], 0), (["script.py", "0.3"], 1), (["--same-draws", "script.py", "0.3"], 0)]


@pytest.mark.parametrize(("words", "status"), RUNS)
def test_a_script_is_compared_with_the_trainer_of_transformers(tmp_path, words, status):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [str(Path(sys.executable).with_name("trainer")), "drop-in", "--compare", "--into", "both", *words]
    options = ["--output_dir", "mine", "--max_steps", "3", "--logging_steps", "1", "--report_to", "none", "--use_cpu"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    for row in ("Dropout", "Random numbers drawn while loading"):
        assert (f"\n  {row}\n" in done.stdout) == (status == 1)
    assert sorted(os.listdir(tmp_path)) == ["both", "script.py"]
    assert (tmp_path / "both/ours/mine/model.safetensors").exists()


def test_scripts_are_counted_once_whose_training_is_equal():
    first, second, third = (official_examples.Case(name, f"{name[0]}.py", "") for name in ("a1", "a2", "b1"))
    words = official_examples.EQUAL, official_examples.EVALUATION, official_examples.NAMED
    outcomes = [
        official_examples.Outcome(case, word, "why") for case, word in zip((first, second, third), words, strict=True)
    ]
    shown = official_examples.table(outcomes)
    assert "3 runs: 1 differs by a known row, 1 equal in training, 1 equal to the bit" in shown
    assert "scripts whose training is equal to the bit: 1" in shown


def test_a_folder_without_the_scripts_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        official_examples.main([str(tmp_path)])
    assert "run_glue.py" in capsys.readouterr().err
