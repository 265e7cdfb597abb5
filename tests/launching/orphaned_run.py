"""Train slowly, and say which place has been reached. Started by the tests of launchers that are killed.

Usage: orphaned_run.py FOLDER PLACE [--stubborn]; PLACE is where all ranks wait.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

FOLDER, PLACE, STUBBORN = Path(sys.argv[1]), sys.argv[2], "--stubborn" in sys.argv


def reach(place):
    if place == PLACE:
        (FOLDER / f"reached-{os.getpid()}").write_text(place)
        if STUBBORN:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctypes.CDLL(None).sleep(600)
        time.sleep(0 if PLACE == "nowhere" else 5)


def main():
    (FOLDER / f"rank-{os.getpid()}").touch()
    reach("start")

    import torch
    from torch import nn

    from tr_core import Trainer, TrainerCallback, TrainingArguments

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            if not self.training:
                reach("evaluation")
            return {"loss": self.layer(x).square().mean()}

    class Places(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                reach("training")

        def on_checkpoint(self, folder, step):
            reach("saving")

    before = [int(path.name.removeprefix("rank-")) for path in FOLDER.glob("rank-*")]
    args = TrainingArguments(
        str(FOLDER / "out"),
        max_steps=8,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    reach("rendezvous")
    rows = [{"x": torch.ones(2)}] * 64
    trainer = Trainer(Network(), args, train_dataset=rows, eval_dataset=rows[:8], callbacks=[Places()])
    trainer.train(resume_from_checkpoint="auto")
    if trainer.is_world_process_zero():
        print("complete", trainer.state.global_step, len(before), flush=True)
    trainer.end()


if __name__ == "__main__":
    main()
