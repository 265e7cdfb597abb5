"""A run that was stopped and went on ends with the same bits as one that was not."""

import pytest
import torch
from ckpt_parts import Run, decaying

from tr_ckpt import Checkpointer

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "LBFGS": torch.optim.LBFGS,
}

SCHEDULES = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "LambdaLR": decaying,
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 9),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}
if hasattr(torch.optim.swa_utils.SWALR, "_set_anneal_func"):  # before, its state held a function, which is refused
    SCHEDULES["SWALR"] = lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05)


def resumed_equals_uninterrupted(tmp_path, **kinds):
    whole = Run(**kinds)
    whole.train(7)

    stopped = Run(**kinds)
    stopped.train(3)
    Checkpointer(tmp_path).save(3, stopped.parts())
    torch.randn(99)  # whatever happens to the process afterwards

    resumed = Run(**kinds)
    torch.manual_seed(1)
    assert Checkpointer(tmp_path).restore(resumed.parts()) == 3
    resumed.train(4)
    return torch.equal(resumed.weights(), whole.weights())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bits_with_every_optimizer(optimizer, tmp_path):
    assert resumed_equals_uninterrupted(tmp_path, optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*", "ignore:The epoch parameter in `scheduler.step")
def test_a_resumed_run_ends_with_the_same_bits_with_every_schedule(schedule, tmp_path):
    assert resumed_equals_uninterrupted(tmp_path, schedule=SCHEDULES[schedule])
