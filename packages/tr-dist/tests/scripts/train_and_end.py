"""Train a little on gloo and end in the way that the command line names."""

import sys
import time

import torch

from tr_dist import DDP

how = sys.argv[1]
torch.set_num_threads(1)
strategy = DDP(use_cpu=True)
model = strategy.prepare(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
for step in range(20):
    if how == "raise" and step == 10 and strategy.rank == 1:
        raise ArithmeticError(f"rank {strategy.rank} fails in step {step}")
    if how == "raise_and_linger" and step == 10 and strategy.rank == 1:
        try:
            raise ArithmeticError(f"rank {strategy.rank} fails in step {step}")
        finally:
            strategy.close(failed=True)
    with strategy.accumulate(model, sync=True):
        strategy.backward(model(torch.randn(8, 64)).pow(2).mean())
    for parameter in model.parameters():  # by hand: a process's first optimizer imports for as long as all of torch
        parameter.data -= 0.1 * parameter.grad
    model.zero_grad()
if how == "close":
    strategy.close()
elif how == "close_and_delete":
    strategy.close()
    del model
elif how == "close_and_work_on":
    strategy.close()
    time.sleep(0.2)
# "nothing": the process just ends
