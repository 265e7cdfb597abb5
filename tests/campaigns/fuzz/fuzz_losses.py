"""Losses: the function that a user would write, the ways to hand it to a Trainer, and to divide it by the count."""

import json
import pickle
from fractions import Fraction

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Ways to divide a sum by the count.
DIVISIONS = {
    "divided": lambda total, n: total / n,
    "torch.div": torch.div,
    "times reciprocal": lambda total, n: total * n.reciprocal(),
    "to the power of -1": lambda total, n: total * n.float().pow(-1),
    "1 / n": lambda total, n: total * (1 / n),
    "clamped": lambda total, n: total / n.clamp(min=1),
    "float": lambda total, n: total / float(n),
    "int": lambda total, n: total / int(n),
    "max of int": lambda total, n: total / max(int(n), 1),
    "item": lambda total, n: total * (1.0 / n.item()),
    "tolist": lambda total, n: total / n.tolist(),
    "in steps": lambda total, n: total / (2 * n) * 2,
    "where": lambda total, n: torch.where(n > 0, total / n, total),
    "stacked": lambda total, n: torch.stack([total / n, total / n]).mean(),
    "expanded": lambda total, n: (total.expand(3) / n.expand(3)).mean(),
    "einsum": lambda total, n: torch.einsum(",->", total, 1 / n),
    "as_tensor": lambda total, n: total / torch.as_tensor(n, dtype=torch.float32),
    "tensor of a number": lambda total, n: total / torch.tensor(int(n)),
    "torch.full": lambda total, n: total * torch.full((), 1 / int(n)),
    "from_numpy": lambda total, n: total / torch.from_numpy(n.numpy()),
    "numpy scalar": lambda total, n: total / np.float64(n.item()),
    "lerp": lambda total, n: torch.lerp(torch.zeros(()), total, 1 / n.item()),
    "logarithms": lambda total, n: torch.exp(torch.log(total) - torch.log(n)) * 1,
    "square of a root": lambda total, n: (total.sqrt() / n.item() ** 0.5) ** 2,
    "dot": lambda total, n: torch.dot(total.expand(2), torch.full((2,), 0.5 / int(n))),
    "vmap": lambda total, n: torch.vmap(lambda part: part / n)(total.expand(4) / 4).sum(),
    "own function": lambda total, n: Quotient.apply(total, n),
    "checkpoint": lambda total, n: checkpoint(lambda x: x / n.item(), total, use_reentrant=False),
    "fraction": lambda total, n: total * float(Fraction(1, int(n))),
    "pickled": lambda total, n: total / pickle.loads(pickle.dumps(n)),
    "json": lambda total, n: total / json.loads(json.dumps(n.item())),
    "text": lambda total, n: total / float(f"{n}"),
    "length": lambda total, n: total / len(range(int(n))),
    "sum of ones": lambda total, n: total / torch.ones(int(n)).sum(),
    "mean of zeros beside it": lambda total, n: torch.cat([total[None], total.new_zeros(int(n) - 1)]).mean(),
    "by index": lambda total, n: _by_index(total, n),
    "scattered": lambda total, n: total.new_zeros(2).scatter_add(0, torch.zeros(1).long(), total[None] / n).sum(),
    "addcdiv": lambda total, n: torch.addcdiv(torch.zeros(()), total, n.float()),
    "double": lambda total, n: (total.double() / n).float(),
}
# Ways to use the count that leave a mean as it is.
LOOKS = {
    "not used": lambda mean, n: mean,
    "asserted": lambda mean, n: mean if n > 0 else None,
    "read": lambda mean, n: (int(n), float(n), n.item(), f"{n}", mean)[-1],
    "plus nothing": lambda mean, n: mean + 0 * n,
    "there and back": lambda mean, n: mean / n * n,
    "times one": lambda mean, n: mean * (n / n),
    "beside it": lambda mean, n: (mean.detach() / n, mean)[-1],
    "chosen": lambda mean, n: torch.where(n > 0, mean, 0.0),
}


class Quotient(torch.autograd.Function):
    """Nothing in it is seen by autograd."""

    @staticmethod
    def forward(ctx, total, n):
        ctx.save_for_backward(n)
        return total / n

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.saved_tensors[0], None


def _by_index(total, n):
    result = total.new_zeros(3)
    result[1] = total / n
    return result.sum()


def loss_between(run, logits, labels, items=None, smoothing=0.0):
    """Return the mean loss over a batch's targets, or their sum divided by `items`."""
    how = "mean" if items is None else "sum"
    if run.kind == "numbers":
        loss = F.mse_loss(logits, labels, reduction=how)
    else:
        if run.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        flat = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
        loss = F.cross_entropy(*flat, reduction=how, label_smoothing=smoothing)
    return loss if items is None else DIVISIONS.get(run.way, torch.div)(loss, torch.as_tensor(items))


def function_of(run):
    """Return what `compute_loss_func` is, or None."""
    if run.loss == "function":
        return lambda outputs, labels: loss_between(run, outputs["logits"], labels)
    if run.loss == "function_counted":

        def counted(outputs, labels, num_items_in_batch=None):
            return loss_between(run, outputs["logits"], labels, num_items_in_batch)

        return counted
    if run.loss == "function_looked":

        def looked(outputs, labels, num_items_in_batch=None):
            mean = loss_between(run, outputs["logits"], labels)
            return mean if num_items_in_batch is None else LOOKS.get(run.way, LOOKS["read"])(mean, num_items_in_batch)

        return looked
    return None


def override_of(run):
    """Return a `compute_loss` that a subclass would have."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        items = num_items_in_batch if run.loss == "override_counted" else None
        loss = loss_between(run, outputs["logits"], inputs["labels"], items)
        if run.loss == "override_looked" and num_items_in_batch is not None:
            assert num_items_in_batch > 0, f"{num_items_in_batch} targets"
            loss = LOOKS.get(run.way, LOOKS["read"])(loss, num_items_in_batch)
        loss = {"loss": loss, "half": loss.detach() / 2} if run.loss == "parts" else loss
        return (loss, outputs) if return_outputs else loss

    return compute_loss
