"""Train a little on gloo and end in the way that the command line names."""

import sys

import torch

from tr_dist import DDP

how = sys.argv[1]
torch.set_num_threads(1)
strategy = DDP(use_cpu=True)
model = strategy.prepare(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
try:
    for step in range(20):
        if how == "raise" and step == 10 and strategy.rank == 1:
            raise ArithmeticError(f"rank {strategy.rank} fails in step {step}")
        with strategy.accumulate(model, sync=True):
            strategy.backward(model(torch.randn(8, 64)).pow(2).mean())
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
        model.zero_grad()
except ArithmeticError:
    raise  # rank 1 never closes
except RuntimeError:
    strategy.close(failed=True)  # rank 0, which lost its peer
    raise
if how == "close":
    strategy.close()
    del model  # and with it what torch keeps beside the model, right after the last collective
# "nothing": the process just ends
