"""Read what a run left."""

import numpy as np
import pytest
import torch


def weights(trainer):
    """Return all weights of a trained model in one row."""
    return torch.cat([p.detach().flatten().float() for p in trainer.model.parameters()])


def distance(first, second):
    """Return the largest difference between the weights of two runs."""
    return (weights(first) - weights(second)).abs().max().item()


def logged(trainer, name):
    """Return the logged values of a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def history(trainer):
    """Return what was logged but for times, and without the sum at the end, which is of one call of `train`."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second"))}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]


def without_speed(metrics):
    """Return metrics without those that depend on the machine."""
    return {k: v for k, v in metrics.items() if not k.endswith(("runtime", "per_second", "epoch"))}


def assert_close(given, expected):
    """Compare metrics, arrays included."""
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        assert np.asarray(given[name]) == pytest.approx(np.asarray(value), rel=1e-6), name


def nudged(model):
    """Return a model after every weight was rounded once more, up or down.

    How far apart two runs end that begin so is how far roundings in another order may take them.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + up * torch.finfo(weight.dtype).eps)
    return model
