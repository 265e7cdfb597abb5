"""`trainer drop-in --compare` runs a script on two Trainers, and says where their numbers part."""

import json
import os
import sys
from pathlib import Path

import pytest

from tr_all.compare import output_below
from tr_all.drop_in import REPLACED, main

# In the place of transformers' Trainer: ours, whose loss may be another.
THEIRS = """
import os
import torch
from tr_core import Trainer as Base

class Trainer(Base):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        if self.state.global_step >= 2:
            loss = loss * float(os.environ["FACTOR"])
        return (loss, outputs) if return_outputs else loss
"""
SCRIPT = """
import sys
import torch
from transformers import Trainer, TrainingArguments

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels=None):
        if "--dropout" in sys.argv:
            x = torch.nn.functional.dropout(x, 0.5)
        y = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "y": y}

def batch(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

torch.manual_seed(0)
rows = [{"x": [n / 10], "labels": [n / 5]} for n in range(16)]
folder = sys.argv[2] if sys.argv[1] == "--output_dir" else "out"
options = {"max_steps": 4, "logging_steps": 1, "report_to": "none", "save_steps": 2, "use_cpu": True}
args = TrainingArguments(output_dir=folder, disable_tqdm=True, max_grad_norm=0, **options)
trainer = Trainer(Line(), args, train_dataset=rows, eval_dataset=rows[:8], data_collator=batch)
trainer.train()
trainer.evaluate()
if "--fail" in sys.argv and trainer.__class__.__module__ != "transformers.trainer":
    raise SystemExit("no such thing here")
"""


@pytest.fixture
def transformers(tmp_path, monkeypatch):
    """A package with the names of transformers, whose Trainer is a subclass of ours, for this and other processes."""
    folder = tmp_path / "site" / "transformers"
    folder.mkdir(parents=True)
    imports = []
    for module, names in REPLACED.items():
        lines = [f"from {origin} import {name}\n" for name, origin in names.items()]
        path = folder / f"{module.rpartition('.')[2]}.py"
        path.write_text("".join(lines) + (THEIRS if module == "transformers.trainer" else ""))
        imports.append(f"from {module} import {', '.join(names)}\n")
    (folder / "__init__.py").write_text("".join(imports))
    paths = [str(folder.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(str(folder.parent))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("FACTOR", "1.0")
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return folder


def test_runs_that_are_equal_to_the_bit_end_with_0(transformers, tmp_path, capsys):
    assert main(["--compare", "--into", "both", "script.py", "--output_dir", "elsewhere/mine"]) == 0
    shown = capsys.readouterr().out
    assert "equal: 6 log entries, to the bit" in shown
    assert "weights at the end of training: equal to the bit" in shown
    assert "saved weights in mine/checkpoint-4: equal to the bit" in shown
    assert "ours: started" in shown
    assert "step 4 of 4, 6 log entries" in shown
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"transformers", "ours", "comparison.json"}
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_runs_that_differ_end_with_1_and_show_where(transformers, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FACTOR", "1.5")
    assert main(["--compare", "--into", "both", "script.py", "without", "an output_dir of its own"]) == 1
    shown = capsys.readouterr().out
    assert "they part at step 3, in entry 3 of the log" in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["learning_rate"][1:] == ["4", "never"]
    assert rows["loss"][2] == "3"
    assert float(rows["loss"][3]) == pytest.approx(1.5 * float(rows["loss"][4]))
    assert "saved weights in out/checkpoint-2: equal to the bit" in shown
    assert "saved weights in out/checkpoint-4: 2 of 2 differ (layer.bias, layer.weight)" in shown
    assert "none of the known causes applies" in shown
    summary = json.loads((tmp_path / "both/comparison.json").read_text())
    assert not summary["equal"]
    assert {"loss", "train_loss"} <= set(summary["differing"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_random_numbers_that_the_model_draws_are_named_as_a_cause(transformers, monkeypatch, capsys):
    monkeypatch.setenv("FACTOR", "1.5")
    assert main(["--compare", "--into", "both", "script.py", "--output_dir", "out", "--dropout"]) == 1
    shown = capsys.readouterr().out
    assert "known causes that apply" in shown
    assert "\n  Dropout\n" in shown


def test_a_run_that_fails_ends_with_2_and_the_last_lines_of_its_errors(transformers, capsys):
    assert main(["--compare", "--into", "both", "script.py", "--output_dir", "out", "--fail"]) == 2
    shown = capsys.readouterr().err
    assert "the script failed on this Trainer with exit code 1" in shown
    assert "no such thing here" in shown


def test_a_script_without_a_trainer_has_nothing_to_compare(transformers, tmp_path, capsys):
    Path("empty.py").write_text("print('hello')\n")
    assert main(["--compare", "--into", "both", "empty.py"]) == 2
    assert "built no Trainer" in capsys.readouterr().err


def test_without_transformers_the_comparison_says_what_to_install(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr("tr_all.compare.find_spec", lambda name: None)
    assert main(["--compare", str(script)]) == 2
    assert "pip install transformers" in capsys.readouterr().err


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr("tr_all.compare.find_spec", lambda name: True)
    assert main(["--compare", "--into", str(tmp_path), str(script)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_folder_without_a_comparison_is_refused(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(SystemExit):
        main(["--into", "both", str(script)])
    assert "--into and --same-draws need --compare" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--output_dir", "a/out"], ["--output_dir=/b/out"]])
def test_the_folder_among_the_arguments_becomes_one_below_the_run(given, tmp_path):
    words = output_below(tmp_path, ["--seed", "1", *given, "--lr", "2"])
    assert words[0:2] + words[-2:] == ["--seed", "1", "--lr", "2"]
    assert " ".join(words[2:-2]).replace("=", " ") == f"--output_dir {tmp_path / 'out'}"
