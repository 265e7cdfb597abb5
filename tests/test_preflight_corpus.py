"""`trainer check` on broken configurations that take several packages, and as the command that it is."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "packages/tr-core/tests"))

from broken_configs_runner import assert_found, copy_corpus, name_of, read_cases, run_check  # noqa: E402

from tr_core.preflight import check  # noqa: E402

CORPUS = Path(__file__).parent / "broken_configs"
OF_CORE = ROOT / "packages/tr-core/tests/broken_configs"
BROKEN, GOOD = read_cases(CORPUS, "case"), read_cases(CORPUS, "good")


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """The corpus with the runs that it resumes."""
    folder = copy_corpus(CORPUS, tmp_path_factory.mktemp("corpus"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        runpy.run_path("make_runs.py")
        del sys.modules["parts"]
    return folder


@pytest.fixture
def corpus(material, tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(copy_corpus(material, tmp_path))
    yield tmp_path
    sys.modules.pop("parts", None)


@pytest.mark.parametrize("case", BROKEN, ids=name_of)
def test_a_broken_configuration_gives_its_code_and_message_and_no_other(case, corpus, capsys, monkeypatch):
    if "free_bytes" in case:
        usage = shutil.disk_usage(".")._replace(free=case["free_bytes"])
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    before = sorted(path for path in corpus.rglob("*") if "__pycache__" not in path.parts)
    code, report = run_check(case, capsys)
    assert_found(case, code, report)
    assert sorted(path for path in corpus.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.parametrize("case", GOOD, ids=name_of)
def test_a_good_configuration_has_no_problems(case, corpus, capsys):
    code, report = run_check(case, capsys)
    assert [problem for problem in report["problems"] if problem["severity"] != "info"] == []
    assert code == 0


AT_NIGHT = ("long_warmup.toml", "lambda_collator.py", "summed_loss.py", "misspelt_metric.py")


@pytest.mark.parametrize(
    "name", ["typo.yaml", "own_loop.py", *(pytest.param(name, marks=pytest.mark.slow) for name in AT_NIGHT)]
)
def test_the_command_itself_finds_the_same_and_exits_with_1(name, tmp_path):
    copy_corpus(OF_CORE, tmp_path)
    case = next(case for case in read_cases(OF_CORE, "case") if case["file"] == name)
    command = [str(Path(sys.executable).with_name("trainer")), "check", "--json", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert_found(case, done.returncode, json.loads(done.stdout))


def test_the_command_prints_a_table_and_exits_with_0_where_nothing_is_wrong(tmp_path):
    copy_corpus(OF_CORE, tmp_path)
    command = [str(Path(sys.executable).with_name("trainer")), "check", "good_classifier.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "preflight of good_classifier.py"
    assert lines[-1] == "no problems found"
    assert "  metrics               eval_accuracy, eval_loss" in lines
    assert not (tmp_path / "out").exists()


def test_the_size_of_a_checkpoint_is_that_of_the_file_that_is_written(corpus):
    """But for the JSON beside the tensors, which a model of a real size does not show."""
    sys.path.insert(0, str(corpus))
    import parts
    import torch

    model = parts.Classifier()
    model.layers[0] = torch.nn.Sequential(torch.nn.Linear(8, 4000), torch.nn.Tanh(), torch.nn.Linear(4000, 16))
    args = parts.TrainingArguments("new", max_steps=2, save_steps=1, use_cpu=True, ema_decay=0.9, disable_tqdm=True)
    figures = check(parts.Trainer(model, args, train_dataset=parts.rows())).figures
    parts.Trainer(model, args, train_dataset=parts.rows()).train()
    sizes = [sum(file.stat().st_size for file in Path(f"new/checkpoint-{step}").iterdir()) for step in (1, 2)]
    assert figures["checkpoints_at_once"] == 2
    assert max(sizes) == pytest.approx(figures["checkpoint_bytes"], rel=0.05)
    assert sum(sizes) == pytest.approx(figures["disk_bytes"], rel=0.05)
    sys.path.remove(str(corpus))


def test_a_script_that_trains_with_another_trainer_is_stopped_at_its_first_step(tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    script = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
model = BertForSequenceClassification(BertConfig(**sizes))
data = [{"input_ids": torch.arange(5), "labels": index % 2} for index in range(8)]
args = TrainingArguments("out", report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False)
Trainer(model, args, train_dataset=data).train()
open("trained", "w")
"""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(script)
    code, report = run_check({"file": "script.py"}, capsys)
    assert (code, [problem["code"] for problem in report["problems"]]) == (1, ["T011"])
    assert report["problems"][0]["origin"].startswith("script.py:9")
    assert not Path("trained").exists()


@pytest.mark.launcher
@pytest.mark.slow
def test_two_processes_are_checked_together_and_one_of_them_reports(tmp_path):
    copy_corpus(OF_CORE, tmp_path)
    (tmp_path / "two.py").write_text(
        "import parts\n\nparts.train(eval_dataset=parts.rows(6), gradient_accumulation_steps=2)\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = [*launcher, str(Path(sys.executable).with_name("trainer")), "check", "--json", "two.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [problem for problem in report["problems"] if problem["severity"] != "info"] == []
    assert (report["figures"]["world_size"], report["figures"]["steps"]) == (2, 2)
    assert not (tmp_path / "out").exists()
