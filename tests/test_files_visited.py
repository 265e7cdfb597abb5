"""Count the source files that a reader has to follow for a save, a resume and a flag of the command line."""

import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import tr_args
import tr_ckpt
import tr_core
import tr_log
from tr_core import Trainer, TrainingArguments

SOURCES = tuple(str(Path(package.__file__).parent) for package in (tr_core, tr_args, tr_log, tr_ckpt))
# What transformers visits: 12 files for a save, 12 for a flag.
MOST_OF_A_SAVE, MOST_OF_A_RESUME, MOST_OF_A_FLAG = 39, 41, 15


class Linear(nn.Module):
    """A model with a loss."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.inner(x), labels)}


@contextmanager
def visited():
    """Collect the files of this project in which a function is called."""
    files: set[str] = set()

    def see(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            files.add(frame.f_code.co_filename)

    sys.setprofile(see)
    try:
        yield files
    finally:
        sys.setprofile(None)


@contextmanager
def visits_of(monkeypatch, module, name):
    """Collect the files that calls of one function visit."""
    original, files = getattr(module, name), set()

    def watched(*given, **named):
        with visited() as seen:
            result = original(*given, **named)
        files.update(seen)
        return result

    with monkeypatch.context() as patched:
        for holder in [m for key, m in sys.modules.items() if key.startswith("tr_core")]:
            if getattr(holder, name, None) is original:
                patched.setattr(holder, name, watched)
        yield files


def trainer(folder, **more):
    rows = [{"x": torch.ones(2), "labels": torch.tensor(1)}] * 8
    settings = {"save_steps": 2, "max_steps": 4, "disable_tqdm": True, "use_cpu": True, "report_to": "none", **more}
    arguments = TrainingArguments(output_dir=str(folder), per_device_train_batch_size=2, **settings)
    return Trainer(Linear(), arguments, train_dataset=rows)


def short(files):
    return sorted(file.partition("/src/")[2] for file in files)


def test_a_save_is_followed_through_few_files(tmp_path, monkeypatch):
    from tr_core.checkpoint import saving

    run = trainer(tmp_path)
    with visits_of(monkeypatch, saving, "save_checkpoint") as files:
        run.train()
    assert 5 < len(files) <= MOST_OF_A_SAVE, short(files)


def test_a_resume_is_followed_through_few_files(tmp_path, monkeypatch):
    from tr_core.checkpoint import restoring

    trainer(tmp_path).train()
    run = trainer(tmp_path, max_steps=6)
    with visits_of(monkeypatch, restoring, "resume_run") as files:
        run.train(resume_from_checkpoint=True)
    assert 5 < len(files) <= MOST_OF_A_RESUME, short(files)


def test_a_flag_is_followed_through_few_files(monkeypatch):
    from tr_args import ArgumentParser

    monkeypatch.delitem(sys.modules, "accelerate.logging", raising=False)  # for which more would be done
    parser = ArgumentParser(TrainingArguments)
    with visited() as files:
        parser.parse_args_into_dataclasses(["--output_dir", "out", "--learning_rate", "1e-3"])
    assert 5 < len(files) <= MOST_OF_A_FLAG, short(files)
