"""What a step and an epoch cost is counted in calls of Python: the same on any machine, however busy."""

import os
import sys

from support.models import Classifier

import tr_args
import tr_core
import tr_log

OWN = tuple(os.path.dirname(package.__file__) for package in (tr_args, tr_core, tr_log))


def own_calls(make_trainer, steps, samples):
    """Return how many functions of these packages a run of so many steps of 4 samples calls."""
    trainer = make_trainer(
        samples,
        model=Classifier(),
        per_device_train_batch_size=4,
        max_steps=steps,
        logging_steps=1000,
        num_train_epochs=1,
    )
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(OWN)

    sys.setprofile(count)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    return calls


def test_an_epoch_costs_no_more_calls_than_some_steps(make_trainer):
    own_calls(make_trainer, 2, 8)  # what is done once a process
    few, many = (own_calls(make_trainer, steps, 400) for steps in (20, 90))
    step = (many - few) / 70
    epochs = own_calls(make_trainer, 90, 12)  # 30 epochs of 3 steps
    epoch = (epochs - many) / 29
    assert step < 60  # 37 when this was written
    assert epoch < 15 * step  # 10; reading the facts of all arguments anew made it 28
