"""Label smoothing against the reference's, on outputs of every shape."""

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother as ReferenceSmoother

from tr_core.testing import LabelSmoother


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("shape", "shifts"), [((6, 5), False), ((3, 7, 5), False), ((3, 7, 5), True)])
def test_the_loss_and_its_gradient_are_those_of_the_reference(shape, shifts, counted):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    labels[0] = -100
    count = torch.tensor(11) if counted else None
    ours = LabelSmoother(0.2, torch.nn.Linear(1, 1), lambda: shifts)
    results = []
    for smoother, options in ((ReferenceSmoother(epsilon=0.2), {"shift_labels": shifts}), (ours, {})):
        leaf = logits.clone().requires_grad_()
        loss = smoother({"logits": leaf}, labels.clone(), num_items_in_batch=count, **options)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    # One sum over everything there, a fused kernel here: the last bits differ.
    torch.testing.assert_close(results[1][0], results[0][0], rtol=2e-6, atol=0)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=2e-5, atol=1e-7)
