"""Secrets that are planted in arguments, addresses, variables and commands show nowhere."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from shared.commands import TRAINER

from tr_args import ArgumentParser, ArgumentsError, TrainingArguments

LIMIT_S = 150
TOKEN = "hf_" + "SeCrEt" * 6
PASSWORD = "correct-horse-battery"
ADDRESS = f"https://somebody:{PASSWORD}@hub.example/owner/name?token={PASSWORD}"
SCRIPT = """
import sys, torch
from torch import nn
from tr_core import Trainer, TrainingArguments
from tr_args import ArgumentParser

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
    def forward(self, x, labels):
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

data = [{"x": torch.randn(3), "labels": torch.tensor(i % 2)} for i in range(16)]
[args] = ArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(Network(), args, train_dataset=data)
trainer.train()
trainer.save_model()
trainer.save_state()
trainer.create_model_card()
print(args, args.to_json_string(), args.to_sanitized_dict())
"""


def clean(text):
    return TOKEN not in text and PASSWORD not in text


@pytest.mark.parametrize(
    "values",
    [
        {"hub_model_id": ADDRESS},
        {"hub_model_id": f"owner/name@{TOKEN}"},
        {"hub_token": [TOKEN]},
        {"max_steps": "x" * 50 + f" https://somebody:{PASSWORD * 20}@host"},
        {"max_steps": TOKEN},
        {"report_to": ADDRESS, "seed": ADDRESS},
        {"hub_strategy": TOKEN},
        {"deepspeed": ADDRESS},
        {"lr_scheduler_kwargs": TOKEN},
        {"learning_rate": {"api_key": TOKEN}},
        {"optim_args": TOKEN},
    ],
)
def test_an_error_about_arguments_shows_no_secret(values):
    try:
        args = TrainingArguments(**values)
        shown = f"{args} {args.to_json_string()} {args.to_sanitized_dict()}"
    except ArgumentsError as error:
        shown = f"{error} {error!r}"
    assert clean(shown), shown


def test_a_command_line_and_files_that_are_refused_show_no_secret(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"hub_tokn": TOKEN, TOKEN: 1, "seed": ADDRESS}))
    words = [
        "--config",
        str(tmp_path / "x.json"),
        TOKEN,
        f"--hub_tokn={TOKEN}",
        "--bf16",
        ADDRESS,
        f"--no_bf16={TOKEN}",
    ]
    with pytest.raises(ArgumentsError) as caught:
        ArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert clean(str(caught.value))


def test_arguments_with_secrets_in_mappings_are_written_without_them():
    args = TrainingArguments(run_name=ADDRESS, deepspeed={"wandb": {"api_key": PASSWORD, "team": "ours"}})
    text = f"{args} {args.to_json_string()} {args.to_sanitized_dict()}"
    assert clean(text)
    assert "ours" in text
    assert args.run_name == ADDRESS


@dataclass
class Service:
    passphrase: str
    team: str = "ours"


@dataclass
class WithSecrets(TrainingArguments):
    wandb_key: str = PASSWORD
    image_token: str = "<image>"
    service: Any = field(default_factory=lambda: [Service(PASSWORD), {"private_key": {"pem": PASSWORD}}])


def test_arguments_of_a_subclass_are_written_without_what_is_named_as_a_secret():
    args = WithSecrets(optim_args={"api_key": PASSWORD})
    text = f"{args} {args.to_json_string()} {args.to_sanitized_dict()}"
    assert clean(text), text
    assert args.to_dict()["image_token"] == "<image>"
    assert args.to_dict()["service"] == [{"passphrase": "***", "team": "ours"}, {"private_key": "***"}]
    assert WithSecrets.from_dict(args.to_dict() | {"service": []}).wandb_key == PASSWORD, "its default"
    with pytest.raises(ArgumentsError) as caught:
        WithSecrets(wandb_key=[PASSWORD])
    assert clean(f"{caught.value}"), caught.value


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "ACCELERATE"))}
    return {**kept, "HF_TOKEN": TOKEN, "WANDB_API_KEY": PASSWORD, **variables}


def run(words, folder, **variables):
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(**variables),
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_run_leaves_no_secret_in_its_folder_and_says_none(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["train.py", "--output_dir", "out", "--max_steps", 4, "--save_steps", 2, "--logging_steps", 1, "--use_cpu"]
    words += ["--hub_token", TOKEN, f"--run_name={ADDRESS}", "--report_to", "jsonl", "--push_to_hub", "false"]
    code, said = run(words, tmp_path)
    assert code == 0, said
    assert clean(said)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        assert TOKEN.encode() not in content, path
        assert PASSWORD.encode() not in content, path


@pytest.mark.parametrize("command", ["dry run", "version", "doctor", "check", "launch"])
def test_a_command_shows_no_secret(tmp_path, command):
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ["--hub_token", TOKEN, f"--hub-token={PASSWORD}", "--api_key", PASSWORD, f"--data={ADDRESS}"]
    (tmp_path / "file.json").write_text(json.dumps({"distributed_type": ADDRESS, "gpu_ids": TOKEN}))
    words = {
        "dry run": ["launch", "--nproc", "1", "--dry_run", "train.py", *flags],
        "version": ["version"],
        "doctor": ["doctor"],
        "check": ["check", "train.py", *flags, "--bf16", TOKEN],
        "launch": ["launch", "--config_file", "file.json", "train.py", *flags],
    }[command]
    code, said = run([TRAINER, *words], tmp_path, MASTER_ADDR=f"https://x:{PASSWORD}@host")
    assert clean(said), said
    if command == "dry run":
        assert code == 0
        assert "--hub_token '***'" in said
    assert said
