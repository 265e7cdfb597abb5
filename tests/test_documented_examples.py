"""Run the documentation's Python examples with their import line changed, and nothing else.

The examples stand here as they are published, in Korean and Chinese; they are the specification. Those of the Arabic
translation are the same, with some commas mistyped. Left out is what needs a GPU or a download; the scripts of GaLore
and LOMO are in `test_galore_example.py` and `test_lomo_example.py`.
"""
# ruff: noqa: RUF001  the examples' comments

import importlib.util
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from shared.callbacks import Stop, StopAt
from shared.documented_logging import LOGGING

from tr_all import ArgumentParser, DataCollatorWithPadding, TrainingArguments, default_data_collator

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from transformers import BertConfig, BertForSequenceClassification, BertTokenizer  # noqa: E402

MINIHUB = Path(__file__).parent.parent / "packages/tr-ckpt/tests/minihub.py"

ARGUMENTS = """
from transformers import TrainingArguments

training_args = TrainingArguments(
    output_dir="your-model",
    learning_rate=2e-5,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    num_train_epochs=2,
    weight_decay=0.01,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    push_to_hub=True,
)
"""

BASIC_USE = """
from transformers import Trainer

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    tokenizer=tokenizer,
    data_collator=data_collator,
    compute_metrics=compute_metrics,
)

trainer.train()
"""

RESUME_NEWEST = """
# 최신 체크포인트에서 재개
trainer.train(resume_from_checkpoint=True)
"""

RESUME_BY_PATH = """
# 출력 디렉토리에 저장된 특정 체크포인트에서 재개
trainer.train(resume_from_checkpoint="your-model/checkpoint-1000")
"""

WEIGHTED_LOSS = {
    "korean": """
from torch import nn
from transformers import Trainer

class CustomTrainer(Trainer):
    def compute_loss(self,

 model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        # 순방향 전파
        outputs = model(**inputs)
        logits = outputs.get("logits")
        # 서로 다른 가중치로 3개의 레이블에 대한 사용자 정의 손실을 계산
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss
""",
    "chinese": """
from torch import nn
from transformers import Trainer


class CustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        # 正向传递
        outputs = model(**inputs)
        logits = outputs.get("logits")
        # 计算自定义损失（假设有3个具有不同权重的标签）
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss
""",
}

STOP_AFTER_TEN_STEPS = """
from transformers import TrainerCallback

class EarlyStoppingCallback(TrainerCallback):
    def __init__(self, num_steps=10):
        self.num_steps = num_steps

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= self.num_steps:
            return {"should_training_stop": True}
        else:
            return {}
"""

WITH_CALLBACK = """
from transformers import Trainer

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    tokenizer=tokenizer,
    data_collator=data_collator,
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback()],
)
"""

NEFTUNE = """
from transformers import TrainingArguments, Trainer

training_args = TrainingArguments(..., neftune_noise_alpha=0.1)
trainer = Trainer(..., args=training_args)
"""

ANY_LOOP = """
from accelerate import Accelerator
from transformers import AdamW, AutoModelForSequenceClassification, get_scheduler

accelerator = Accelerator()

model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
optimizer = AdamW(model.parameters(), lr=3e-5)

train_dataloader, eval_dataloader, model, optimizer = accelerator.prepare(
    train_dataloader, eval_dataloader, model, optimizer
)

num_epochs = 3
num_training_steps = num_epochs * len(train_dataloader)
lr_scheduler = get_scheduler(
    "linear",
    optimizer=optimizer,
    num_warmup_steps=0,
    num_training_steps=num_training_steps
)

progress_bar = tqdm(range(num_training_steps))

model.train()
for epoch in range(num_epochs):
    for batch in train_dataloader:
        outputs = model(**batch)
        loss = outputs.loss
        accelerator.backward(loss)

        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        progress_bar.update(1)
"""

# What the examples take for granted: a model, data, a tokenizer. As source, for the tests that start a process.
TAKEN_FOR_GRANTED = """
import sys
sys.path.insert(0, {tests!r})
from test_documented_examples import surroundings
from pathlib import Path
globals().update(surroundings(Path.cwd()))
"""


def with_our_import(example):
    """Return an example with its import line changed."""
    assert "from transformers import" in example
    return example.replace("from transformers import", "from tr_all import")


def without_hub(example):
    """Return the arguments of the example without the push, for what runs in this process."""
    assert "push_to_hub=True" in example
    return example.replace("    push_to_hub=True,\n", "")


def run(example, namespace):
    exec(example, namespace)
    return namespace


def surroundings(folder, num_labels=2):
    """Return what the examples use and do not define; writes a vocabulary to `folder`."""
    torch.manual_seed(0)
    words = [f"w{number}" for number in range(40)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=num_labels,
    )
    generator = np.random.default_rng(0)

    def rows(count):
        for number in range(count):
            text = " ".join(generator.choice(words, size=generator.integers(2, 10)))
            yield {"text": text, "label": number % num_labels, **tokenizer(text)}

    return {
        "torch": torch,
        "model": BertForSequenceClassification(config),
        "tokenizer": tokenizer,
        "data_collator": DataCollatorWithPadding(tokenizer),
        "dataset": {split: datasets.Dataset.from_list(list(rows(n))) for split, n in (("train", 320), ("test", 15))},
        "compute_metrics": lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    }


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(weights, others):
    assert weights.keys() == others.keys()
    for name in weights:
        assert torch.equal(weights[name], others[name]), name


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the examples write to `your-model`
    return surroundings(tmp_path)


def start(folder, source, **environment):
    """Run source code in a process of its own, after what the examples take for granted."""
    script = folder / "script.py"
    script.write_text(TAKEN_FOR_GRANTED.format(tests=str(Path(__file__).parent)) + source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        timeout=180,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_basic_use_trains_evaluates_saves_the_best_and_pushes_to_the_hub(tmp_path):
    spec = importlib.util.spec_from_file_location("minihub", MINIHUB)
    minihub = sys.modules["minihub"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minihub)
    with minihub.MiniHub() as hub:
        # The client of the hub reads these when it is imported.
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": minihub.TOKEN,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        start(tmp_path, with_our_import(ARGUMENTS) + with_our_import(BASIC_USE), **environment)
        [repository] = hub.repositories
        assert repository.endswith("/your-model")
        pushed = hub.files(repository)
    saved = {path.name for path in (tmp_path / "your-model").iterdir() if path.is_dir()}
    assert saved == {"checkpoint-20", "checkpoint-40"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(pushed)


def test_basic_use_reports_the_metric_after_every_epoch(namespace):
    before = weights(namespace["model"])
    run(without_hub(with_our_import(ARGUMENTS)) + with_our_import(BASIC_USE), namespace)
    history = namespace["trainer"].state.log_history
    assert [entry["epoch"] for entry in history if "eval_accuracy" in entry] == [1.0, 2.0]
    assert not torch.equal(before["classifier.weight"], namespace["model"].classifier.weight)
    best = namespace["trainer"].state.best_model_checkpoint
    assert Path(best).name in ("checkpoint-20", "checkpoint-40")


class Small(torch.nn.Module):
    """Quick enough for the two thousand steps that a checkpoint of step 1000 needs; dropout draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    """What the examples need for a run of 2,000 steps that saves at step 1,000, and its final weights."""
    monkeypatch.chdir(tmp_path)
    points = torch.randn(16_000, 2, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"x": point, "label": int(point[0] > point[1])} for point in points]

    def fresh():
        torch.manual_seed(1)
        return {
            "model": Small(),
            "dataset": {"train": rows, "test": rows[:16]},
            "tokenizer": None,
            "data_collator": default_data_collator,
            "compute_metrics": None,
        }

    arguments = without_hub(with_our_import(ARGUMENTS))
    trained = run(arguments + with_our_import(BASIC_USE), fresh())
    assert trained["trainer"].state.global_step == 2000
    return arguments, fresh, weights(trained["model"])


def test_training_resumes_from_the_newest_and_from_a_named_checkpoint(long_run):
    arguments, fresh, expected = long_run
    before_training = arguments + with_our_import(BASIC_USE).replace("trainer.train()", "")

    named = run(before_training + RESUME_BY_PATH, fresh())
    assert named["trainer"].state.global_step == 2000
    assert_equal(weights(named["model"]), expected)

    elsewhere = before_training.replace('"your-model"', '"another-model"')
    killed = run(elsewhere, fresh())
    killed["trainer"].add_callback(StopAt(1200))
    with pytest.raises(Stop):
        killed["trainer"].train()
    resumed = run(elsewhere + RESUME_NEWEST, fresh())
    assert resumed["trainer"].state.global_step == 2000
    assert_equal(weights(resumed["model"]), expected)


@pytest.mark.parametrize("language", WEIGHTED_LOSS)
def test_the_weighted_loss_trains_and_evaluates(tmp_path, monkeypatch, language):
    monkeypatch.chdir(tmp_path)
    namespace = surroundings(tmp_path, num_labels=3)
    model, test = namespace["model"], namespace["dataset"]["test"]
    batch = namespace["data_collator"]([{**tokens(row), "label": row["label"]} for row in test])
    model.eval()
    with torch.no_grad():
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    weight = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"], weight=weight).item()

    use = with_our_import(BASIC_USE).replace("trainer = Trainer(", "trainer = CustomTrainer(")
    use = use.replace("trainer.train()", "before = trainer.evaluate()\ntrainer.train()")
    run(without_hub(with_our_import(ARGUMENTS)) + with_our_import(WEIGHTED_LOSS[language]) + use, namespace)
    assert namespace["before"]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    unweighted = torch.nn.functional.cross_entropy(logits, batch["labels"]).item()
    assert abs(expected - unweighted) > 1e-3 * unweighted  # else the test would not see the weights
    assert namespace["trainer"].state.global_step == 40


def tokens(row):
    return {name: row[name] for name in ("input_ids", "token_type_ids", "attention_mask")}


@pytest.mark.parametrize("parameter", ["callbacks", "callback"])
def test_the_callback_that_returns_a_dict_stops_after_ten_steps(namespace, parameter):
    # The Korean example passes `callbacks=`, the Arabic one `callback=`.
    example = with_our_import(WITH_CALLBACK).replace("callbacks=", f"{parameter}=")
    run(without_hub(with_our_import(ARGUMENTS)) + with_our_import(STOP_AFTER_TEN_STEPS) + example, namespace)
    namespace["trainer"].train()
    assert namespace["trainer"].state.global_step == 10


@pytest.mark.slow
def test_logging_is_set_up_for_script_and_libraries(tmp_path):
    imports = "import logging, datasets, transformers\nfrom tr_all import Trainer\n"
    # The three dots stand for the arguments of the examples before.
    whole = LOGGING.replace("Trainer(...)", 'Trainer(model=model, args=training_args, train_dataset=dataset["train"],')
    whole += "    eval_dataset=dataset['test'], data_collator=data_collator)\n"
    use = "logger.info('mine')\ntrainer.train()\nprint(datasets.utils.logging.get_verbosity(), log_level)\n"
    script = without_hub(with_our_import(ARGUMENTS)) + imports + whole + use
    done = start(tmp_path, script)
    lines = done.stdout.splitlines()
    when = r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d"
    assert sum(bool(re.fullmatch(rf"{when} - INFO - __main__ - mine", line)) for line in lines) == 1
    assert any(re.match(rf"{when} - INFO - tr_core\.trainer - ", line) for line in lines)
    assert lines[-1] == f"{logging.INFO} {logging.INFO}"
    saved = [line for line in (done.stdout + done.stderr).splitlines() if "saved checkpoint" in line]
    assert len(saved) == 2  # one line for each: the packages' own handler keeps quiet beside the script's


class Watch:
    """Note in training whether the embedding gives what it looks up."""

    def __init__(self, model):
        self.embedding, self.outputs = model.get_input_embeddings(), []

    def on_step_begin(self, args, state, control, model, **kwargs):
        ids = torch.tensor([[5, 6, 7]])
        self.outputs.append(torch.equal(self.embedding(ids), self.embedding.weight[ids]))


def test_neftune_disturbs_the_embedding_in_training_only(namespace):
    namespace["watch"] = Watch(namespace["model"])
    # The three dots stand for the arguments of the examples before.
    arguments = "'your-model', max_steps=3, neftune_noise_alpha"
    parts = "model, train_dataset=dataset['train'], data_collator=data_collator, callbacks=[watch], args="
    example = with_our_import(NEFTUNE).replace("..., neftune_noise_alpha", arguments).replace("..., args=", parts)
    run(example + "trainer.train()\n", namespace)
    assert namespace["watch"].outputs == [False] * 3
    namespace["model"].train()
    namespace["watch"].on_step_begin(None, None, None, None)
    assert namespace["watch"].outputs[-1]


LEVELS = {
    "my_app.py ... --log_level warning --log_level_replica error": (logging.WARNING, logging.ERROR, logging.WARNING),
    "my_app.py ... --log_level warning --log_level_replica error --log_on_each_node 0": (
        logging.WARNING,
        logging.ERROR,
        logging.ERROR,
    ),
    "my_app.py ... --log_level error --log_level_replica error --log_on_each_node 0": (logging.ERROR,) * 3,
}


@pytest.mark.parametrize("command", LEVELS)
def test_the_command_lines_set_the_levels_of_main_process_replica_and_other_node(monkeypatch, command):
    found = []
    for rank, local_rank in ((0, 0), (1, 1), (2, 0)):
        place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        words = shlex.split(command.replace("my_app.py ...", ""))
        [arguments] = ArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
        found.append(arguments.get_process_log_level())
    assert tuple(found) == LEVELS[command]


def test_a_loop_of_ones_own_uses_the_schedule(tmp_path):
    namespace = surroundings(tmp_path)
    namespace["model"].save_pretrained(tmp_path / "checkpoint")
    rows = [{**tokens(row), "label": row["label"]} for row in namespace["dataset"]["train"].select(range(8))]
    loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=namespace["data_collator"])
    tqdm = pytest.importorskip("tqdm.auto").tqdm
    names = {
        "checkpoint": str(tmp_path / "checkpoint"),
        "train_dataloader": loader,
        "eval_dataloader": loader,
        "tqdm": tqdm,
    }
    changed = ANY_LOOP.replace(
        "from transformers import AdamW, AutoModelForSequenceClassification, get_scheduler",
        "from torch.optim import AdamW\nfrom transformers import AutoModelForSequenceClassification\n"
        "from tr_all import get_scheduler",
    )
    run(changed, names)
    assert names["lr_scheduler"].get_last_lr() == [0.0]  # six steps of six
    assert names["progress_bar"].n == 6
