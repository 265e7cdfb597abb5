"""Train, evaluate and predict with all that is shown by default, where standard streams are none, closed or gone."""

import logging
import os
import signal
import sys
import warnings

import torch
from shared.models import LinearClassifier

from tr_core import Trainer, TrainingArguments
from tr_log import capture_warnings, progress

LIMIT_S = 100
CONDITIONS = [
    "none",
    "closed",
    "no descriptors",
    "reader gone",
    "ascii",
    *(["full disk"] if os.path.exists("/dev/full") else []),
]
CASES = [(condition, *flags) for condition in CONDITIONS for flags in ((), ("printed", "captured"))]


def accuracy(prediction):
    warnings.warn("said in an evaluation, with an é", stacklevel=1)
    return {"genauigkeit_für_alle": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def led_away(condition):
    """Lead this process's streams away, as what started it could have done."""
    if condition in ("none", "closed"):
        sys.stdout.flush()
    if condition == "none":
        sys.stdout = sys.stderr = None
    elif condition == "closed":
        sys.stdout.close()
        sys.stderr.close()
    elif condition == "no descriptors":
        sys.stdin = sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None
        for descriptor in range(3):
            os.close(descriptor)
    elif condition in CONDITIONS:
        os.dup2(_opened(condition), 1)
        os.dup2(1, 2)
        encoding = "ascii" if condition == "ascii" else "utf-8"
        # As an interpreter makes them; for it they are never closed.
        sys.stdout = sys.__stdout__ = open(  # noqa: SIM115
            1, "w", closefd=False, encoding=encoding, errors="strict"
        )
        sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
            2, "w", closefd=False, buffering=1, encoding=encoding, errors="backslashreplace"
        )


def _opened(condition):
    if condition == "reader gone":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return os.open("/dev/full" if condition == "full disk" else os.devnull, os.O_WRONLY)


def main(folder, condition, *flags):
    led_away(condition)
    capture_warnings("captured" in flags)
    data = [{"x": torch.randn(3), "labels": torch.tensor(i % 2)} for i in range(16)]
    args = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        disable_tqdm="printed" in flags,
        use_cpu=True,
    )
    trainer = Trainer(LinearClassifier(3, 2), args, train_dataset=data, eval_dataset=data, compute_metrics=accuracy)
    result = trainer.train()
    trainer.log_metrics("train", result.metrics | {"größe": 1})
    trainer.save_metrics("train", result.metrics)
    trainer.evaluate()
    trainer.predict(data)
    trainer.save_model()
    trainer.save_state()
    list(progress(range(3), description="für sich"))
    logging.getLogger("tr_core").error("the end, with an é")


def copies(root):
    """Run under each condition in a copy of this process, and print their exit codes: the imports take the longest."""
    torch.set_num_threads(1)
    main(os.path.join(root, "before"), "as they are")  # which imports what a run needs
    for number, (condition, *flags) in enumerate(CASES):
        sys.stdout.flush()
        if (process := os.fork()) == 0:
            signal.alarm(LIMIT_S)
            main(os.path.join(root, str(number)), condition, *flags)
            return  # and end as any interpreter does
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    copies(*sys.argv[1:]) if len(sys.argv) == 2 else main(*sys.argv[1:])
