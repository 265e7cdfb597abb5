"""Where the time of a real training goes: planted sleeps and kills against the split of its report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_log.report.run_folder import RunFolder
from tr_log.report.time_split import time_split, wall_time

LIMIT_S = 240
SLEEP_S = {"data": 0.01, "evaluation": 0.1, "checkpoint": 0.3}


class Slept:
    """Sleeps, and adds up for how long in a file that survives a kill."""

    def __init__(self, path):
        self.path = path

    def __call__(self, part):
        began = time.perf_counter()
        time.sleep(SLEEP_S[part])
        with open(self.path, "a") as file:
            file.write(json.dumps([part, time.perf_counter() - began, time.time()]) + "\n")


class Rows(torch.utils.data.Dataset):
    """Rows that take time to load."""

    def __init__(self, slept):
        self.slept = slept

    def __len__(self):
        return 800

    def __getitem__(self, index):
        self.slept("data")
        return {"x": torch.full((2,), index / 800), "labels": torch.tensor(index % 2)}


class Slow(nn.Module):
    """A model that takes time to evaluate, and whose state takes time to save."""

    def __init__(self, slept):
        super().__init__()
        self.inner, self.slept = nn.Linear(2, 2), slept

    def forward(self, x, labels):
        if not self.training:
            self.slept("evaluation")
        return {"loss": nn.functional.cross_entropy(self.inner(x), labels)}

    def state_dict(self, *args, **kwargs):
        self.slept("checkpoint")
        return super().state_dict(*args, **kwargs)


class Kill(TrainerCallback):
    """Kills the process at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, kill_at):
    slept = Slept(f"{folder}/slept.jsonl")
    args = TrainingArguments(
        f"{folder}/run",
        max_steps=60,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        logging_steps=5,
        use_cpu=True,
        disable_tqdm=True,
        save_total_limit=1,
    )
    rows = [{"x": torch.ones(2), "labels": torch.tensor(1)}] * 16
    model = Slow(slept)
    trainer = Trainer(model, args, train_dataset=Rows(slept), eval_dataset=rows, callbacks=[Kill(kill_at)])
    trainer.train(resume_from_checkpoint="auto")


def test_the_split_of_a_run_with_two_kills_is_that_of_the_planted_sleeps(tmp_path):
    for kill_at in (30, 50, 0):
        command = [sys.executable, __file__, str(tmp_path), str(kill_at)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == (-signal.SIGKILL if kill_at else 0), done.stderr
    run = RunFolder.read(tmp_path / "run")
    assert [(s.first_step, s.status) for s in run.sessions] == [(0, "killed"), (20, "killed"), (40, "finished")]
    split, wall_s = time_split(run.sessions), wall_time(run.sessions)
    assert sum(split.values()) == pytest.approx(wall_s, rel=1e-3)

    slept = [json.loads(line) for line in (tmp_path / "slept.jsonl").read_text().splitlines()]
    saved = [m["time_s"] for s in run.sessions[:2] for m in s.marks if m["event"] == "checkpoint"]
    ends = [session.end_s for session in run.sessions[:2]]
    lost = [(begin, stop) for begin, stop in zip(saved, ends, strict=True)]

    def kept(when):
        is_lost = any(begin < when <= run.sessions[n + 1].start_s for n, (begin, _) in enumerate(lost))
        restores = any(
            session.start_s <= when <= session.times[0][0] for session in run.sessions
        )  # reads the state too
        return not is_lost and not restores

    for part in SLEEP_S:
        sleeps = [(when - seconds, when) for name, seconds, when in slept if name == part and kept(when)]
        if part == "checkpoint":  # a busy disk takes time too: from the first sleep of a save to the event after it
            marks = [m["time_s"] for s in run.sessions for m in s.marks if m["event"] == "checkpoint"]
            ends = [min(mark for mark in marks if mark > when) for _, when in sleeps]
            sleeps = [(min(b for (b, _), e in zip(sleeps, ends, strict=True) if e == end), end) for end in set(ends)]
        planted = sum(end - begin for begin, end in sleeps)
        assert planted > 0.5
        assert split[part] == pytest.approx(planted, abs=0.01 * wall_s), (part, planted, split, wall_s)
    assert split["redone"] == pytest.approx(sum(stop - begin for begin, stop in lost), abs=0.01 * wall_s)
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_that_fails_at_its_first_step_has_a_page_that_says_so(tmp_path):
    class Fails(Slow):
        def forward(self, x, labels):
            raise ValueError("no such model")

    rows = [{"x": torch.ones(2), "labels": torch.tensor(1)}] * 4
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no")
    with pytest.raises(ValueError, match="no such model"):
        Trainer(Fails(lambda part: None), args, train_dataset=rows).train()
    run = RunFolder.read(tmp_path)
    assert (run.status, run.step, run.sessions[0].error) == ("failed", 0, "ValueError: no such model")
    assert "ValueError: no such model" in (tmp_path / "report.html").read_text()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]))
