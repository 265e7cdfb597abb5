"""Cross entropy of logits of which each process has some words: that of torch from all of them."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from tr_dist import DDP
from tr_dist.mesh.divided_loss import CrossEntropyOfParts
from tr_dist.testing import run_ranks

FORMS = {  # shape of logits, options
    "mean": ((7, 12), {}),
    "sum": ((7, 12), {"reduction": "sum"}),
    "of each": ((7, 12), {"reduction": "none"}),
    "a word ignored": ((7, 12), {"ignore_index": 3}),
    "sequences": ((2, 12, 5), {}),
    "one": ((12,), {}),
}
REFUSED = {
    "smoothing": ({"label_smoothing": 0.1}, "is not done with label_smoothing=0.1; divide the head by colwise_gather"),
    "weight": ({"weight": torch.ones(12)}, "is not done with weight=tensor"),
    "reduction": ({"reduction": "total"}, "reduction='total'"),
    "probabilities": ({"target": torch.ones(7, 12)}, "probabilities as target"),
    "rows divided": ({"rows": True}, r"logits of shape \(8, 12\) placed as \(Shard\(dim=0\),\)"),
}


def targets(shape):
    words = torch.randint(
        12, (*shape[:1], *shape[2:]) if len(shape) > 1 else (), generator=torch.Generator().manual_seed(1)
    )
    if words.dim():
        words.view(-1)[:2] = torch.tensor([3, -100])
    return words


def compare():
    strategy = DDP(use_cpu=True)
    mesh = init_device_mesh("cpu", (2,))
    for shape, options in FORMS.values():
        logits, words = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 9, targets(shape)
        if options.get("ignore_index"):
            words = words.clamp(min=0)
        alone = logits.clone().requires_grad_()
        classes = min(1, len(shape) - 1)
        parts = distribute_tensor(logits, mesh, [Shard(classes)]).requires_grad_()
        expected = F.cross_entropy(alone, words, **options)
        with CrossEntropyOfParts():
            found = torch.nn.CrossEntropyLoss(**options)(parts, words)
        torch.testing.assert_close(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(parts.grad.full_tensor(), alone.grad)
        assert parts.grad.placements == (Shard(classes),)
    for options, said in REFUSED.values():
        place = 0 if options.pop("rows", False) else 1
        logits = distribute_tensor(torch.zeros(8 - place, 12), mesh, [Shard(place)])
        given = {"target": torch.zeros(8 - place, dtype=torch.long)} | options
        with CrossEntropyOfParts(), pytest.raises(ValueError, match=said):
            F.cross_entropy(logits, **given)
    with CrossEntropyOfParts(), pytest.raises(RuntimeError, match="a target is not from 0 to 11"):
        F.cross_entropy(distribute_tensor(torch.zeros(1, 12), mesh, [Shard(1)]), torch.tensor([12]))
    strategy.close()


def test_the_loss_of_logits_in_parts_is_that_of_all_of_them_or_refused():
    run_ranks(compare, 2, timeout_s=120)
