"""Every schedule against the reference's, at every step of a run and beyond its end."""

import pytest
import torch
import transformers

from tr_core import get_scheduler

CASES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-4, "power": 2.0}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 7}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 1.0}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 6}),
    ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "linear", "warmup_type": "cosine"}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "1-sqrt"}),
]


def rates(make, name, options, warmup):
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.05)
    schedule = make(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=20,
        scheduler_specific_kwargs=dict(options),
    )
    found = []
    for _ in range(24):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_schedule_gives_the_rates_of_the_reference(name, options, warmup):
    ours = rates(get_scheduler, name, options, warmup)
    theirs = rates(transformers.get_scheduler, name, options, warmup)
    # The same formulas; min_lr and lr_end are divided by the rate in another order, which can cost the last bit.
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-18)
