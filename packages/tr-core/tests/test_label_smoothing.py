"""The loss of smoothed labels by its equation."""

import pytest
import torch
from torch import nn

from tr_core.loss import LabelSmoother

LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, -100, 0, 6], [3, -100, -100, 5, 4]])


def ForCausalLMLoss(logits, labels, **kwargs): ...  # noqa: N802  known by its name


class Causal(nn.Module):
    loss_function = staticmethod(ForCausalLMLoss)

    def forward(self, ids, labels=None):
        return self.loss_function(ids, labels)


def by_hand(logits, labels, epsilon):
    total, count = 0.0, 0
    for row, label in zip(logits.reshape(-1, 7).double(), labels.reshape(-1).tolist(), strict=True):
        if label != -100:
            log_p = row.log_softmax(0)
            total += float(-(1 - epsilon) * log_p[label] - epsilon * log_p.mean())
            count += 1
    return total, count


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("kind", [dict, tuple])
def test_it_is_the_mean_over_targets_or_their_sum_over_the_count(epsilon, kind):
    outputs = {"loss": None, "logits": LOGITS} if kind is dict else (LOGITS, None)
    smoother = LabelSmoother(epsilon, nn.Linear(1, 1))
    total, count = by_hand(LOGITS, LABELS, epsilon)
    assert count == 7
    assert smoother(outputs, LABELS).item() == pytest.approx(total / 7, rel=1e-6)
    assert smoother(outputs, LABELS, torch.tensor(14)).item() == pytest.approx(total / 14, rel=1e-6)


def test_a_model_that_predicts_the_next_position_has_its_targets_shifted():
    total, count = by_hand(LOGITS[:, :-1], LABELS[:, 1:], 0.1)
    assert count == 5
    assert LabelSmoother(0.1, Causal())({"logits": LOGITS}, LABELS).item() == pytest.approx(total / 5, rel=1e-6)


def test_low_precision_is_computed_in_float32():
    low = LOGITS.to(torch.bfloat16)
    total, count = by_hand(low, LABELS, 0.1)
    found = LabelSmoother(0.1, nn.Linear(1, 1))({"logits": low}, LABELS)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(total / count, rel=1e-6)
