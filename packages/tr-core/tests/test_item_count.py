"""Looking at the count changes nothing, dividing a loss by it does, in whatever form and in every micro-batch."""

import copy
import io

import pytest
import torch
from support.models import IgnoresCount
from support.runs import TORCH, first_gradient, log_of
from torch import nn

from tr_core import SingleDevice, Trainer
from tr_core.item_count import ItemCount, divides_by_any
from tr_core.loss import Division, LossRule

SEEN = []


def note(value):
    SEEN.append(value)


def sees(loss, n):
    note(f"{n} {n:d}")
    return loss


def asserts(loss, n):
    assert n > 0
    assert n == n
    assert not n.isnan()
    return loss


def branches(loss, n):
    return loss if n > 0 else loss * 0.0


def measures(loss, n):
    note(loss.detach() / n)
    return loss


LOOKS = {
    "f-string": sees,
    "format of a float": lambda loss, n: (note(f"{n:.1f}"), loss)[1],
    "str and repr": lambda loss, n: (note(str(n) + repr(n)), loss)[1],
    "print": lambda loss, n: (print(n), loss)[1],
    "int": lambda loss, n: (note(int(n)), loss)[1],
    "float": lambda loss, n: (note(float(n)), loss)[1],
    "item": lambda loss, n: (note(n.item()), loss)[1],
    "tolist": lambda loss, n: (note(n.tolist()), loss)[1],
    "numpy": lambda loss, n: (note(n.cpu().numpy()), loss)[1],
    "index": lambda loss, n: (note(list(range(n))), loss)[1],
    "bool": lambda loss, n: loss if n else loss * 0.0,
    "assert": asserts,
    "branch": branches,
    "where": lambda loss, n: torch.where(n > 0, loss, 0.0),
    "isfinite": lambda loss, n: loss if torch.isfinite(n) else loss * 0.0,
    "torch.equal": lambda loss, n: (note(torch.equal(n, n)), loss)[1],
    "clone": lambda loss, n: (note(n.clone().detach().to("cpu", torch.float32)), loss)[1],
    "arithmetic apart": lambda loss, n: (note(2 * n / 3 + 1), loss)[1],
    "a metric of the loss": measures,
    "a sum of one's own": lambda loss, n: (note(torch.zeros(()).add_(n)), loss)[1],
    "zeros_like": lambda loss, n: loss + torch.zeros_like(n),
    "new_zeros": lambda loss, n: loss + n.new_zeros(()),
    "shape and type": lambda loss, n: (note((n.shape, n.dtype, n.device, n.dim(), torch.is_floating_point(n))), loss)[
        1
    ],
    "deepcopy": lambda loss, n: (note(copy.deepcopy(n)), loss)[1],
    "save": lambda loss, n: (torch.save({"n": n}, io.BytesIO()), loss)[1],
    "a number, and a factor of one's own": lambda loss, n: (note(int(n)), (0.7 * loss + 0.3 * loss) * 2.0 / 2)[1],
}

DIVISIONS = {
    "/": lambda total, n: total / n,
    "/=": lambda total, n: total.__itruediv__(n),
    "div_": lambda total, n: (total.div_(n), total)[1],
    "torch.div": lambda total, n: torch.div(total, n),
    "true_divide": lambda total, n: torch.true_divide(total, n.to(total.device)),
    "reciprocal": lambda total, n: total * n.reciprocal(),
    "pow": lambda total, n: total * n.float().pow(-1),
    "1 / n": lambda total, n: total * (1 / n),
    "of a float": lambda total, n: total / n.float(),
    "clamped": lambda total, n: total / torch.clamp(n, min=1),
    "clamp_min": lambda total, n: total / n.clamp_min(1),
    "max": lambda total, n: total / max(n, 1),
    "torch.maximum": lambda total, n: total / torch.maximum(n, torch.ones_like(n)),
    "plus epsilon": lambda total, n: total / (n + 1e-8),
    "in steps": lambda total, n: total / (n * 2) * 2,
    "where": lambda total, n: torch.where(n > 0, total / n, total),
    "then more": lambda total, n: (total / n).clone().float().squeeze().mean(),
    "stacked": lambda total, n: torch.stack([total / n, total / n]).mean(),
    "detached count": lambda total, n: total / n.detach().clone(),
    "data": lambda total, n: total / n.data,
    "expanded": lambda total, n: (total.expand(2) / n.expand(2)).mean(),
    "einsum": lambda total, n: torch.einsum(",->", total, 1 / n),
    "item": lambda total, n: total / n.item(),
    "int": lambda total, n: total / int(n),
    "float": lambda total, n: total / float(n),
    "max of int": lambda total, n: total / max(int(n), 1),
    "inverse number": lambda total, n: total * (1.0 / n.item()),
    "numpy": lambda total, n: total / float(n.cpu().numpy()),
    "tolist": lambda total, n: total / n.tolist(),
    "format": lambda total, n: total / n if f"{n}" else total,
}


def of(form, divides):
    def loss_function(outputs, labels, num_items_in_batch=None):
        reduction = "sum" if divides else "mean"
        loss = nn.functional.cross_entropy(outputs["logits"], labels, reduction=reduction)
        return form(loss, num_items_in_batch)

    return loss_function


@pytest.fixture(scope="module")
def wholes():
    """The steps in one piece, by precision: what the forms are compared with."""
    return {}


FORMS = [(f"look: {name}", form, False) for name, form in LOOKS.items()]
FORMS += [(f"division: {name}", form, True) for name, form in DIVISIONS.items()]


@pytest.mark.parametrize(("form", "divides"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
def test_four_micro_batches_of_two_give_the_step_of_one_of_eight(make_trainer, wholes, form, divides, bf16):
    """The oracle is the same step in one piece, where there is nothing to divide by but the count itself."""

    def plain_function(outputs, labels):
        return nn.functional.cross_entropy(outputs["logits"], labels)

    if bf16 not in wholes:
        wholes[bf16] = first_gradient(make_trainer, IgnoresCount(), 1, 8, compute_loss_func=plain_function, bf16=bf16)
    whole = wholes[bf16]
    parts = first_gradient(make_trainer, IgnoresCount(), 4, 2, compute_loss_func=of(form, divides), bf16=bf16)
    assert parts[1] == pytest.approx(whole[1], rel=1e-2 if bf16 else 1e-5)
    for one, other in zip(whole[0], parts[0], strict=True):
        assert type(other) is torch.Tensor
        torch.testing.assert_close(one, other, rtol=3e-2 if bf16 else 1e-5, atol=2e-3 if bf16 else 1e-6)


class SumOfOwn(torch.autograd.Function):
    """A kernel of one's own: nothing in it is seen by autograd."""

    @staticmethod
    def forward(ctx, logits, count):
        ctx.save_for_backward(logits, count)
        return (logits**2).sum() / count

    @staticmethod
    def backward(ctx, gradient):
        logits, count = ctx.saved_tensors
        return gradient * 2 * logits / count, None


def test_a_division_within_a_function_of_ones_own_is_seen():
    logits = torch.ones(3, requires_grad=True)
    rule = LossRule(IgnoresCount(), None, SingleDevice("cpu"))
    loss = SumOfOwn.apply(logits, rule.hand_over(torch.tensor(4)))
    assert rule.judge(loss, True, 2, 1.0) is Division.COUNTED
    loss.backward()
    assert type(logits.grad) is torch.Tensor


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("divides", [False, True])
def test_a_compiled_loss_function_is_seen_through_and_compiled_once(backend, divides):
    if divides and TORCH < (2, 8):
        pytest.skip("an older compiler takes a division by a marked count for a break of the graph")
    pytest.importorskip("torch._dynamo").reset()
    graphs = []

    def function(logits, labels, count):
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum" if divides else "mean")
        return loss / count if divides else loss

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(function, backend=counting, fullgraph=True)
    rule = LossRule(IgnoresCount(), None, SingleDevice("cpu"))
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    for count in (4, 5, 6):
        loss = compiled(logits, labels, rule.hand_over(torch.tensor(count)))
        assert rule.judge(loss, True, 2, 1.0) is (Division.COUNTED if divides else Division.MEAN)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_each_micro_batch_is_judged_by_its_own_loss(make_trainer):
    """A loss that is divided by the count in every second micro-batch only."""
    calls = []

    def loss_function(outputs, labels, num_items_in_batch=None):
        calls.append(len(labels))
        if len(calls) % 2:
            return nn.functional.cross_entropy(outputs["logits"], labels)
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    def plain_function(outputs, labels):
        return nn.functional.cross_entropy(outputs["logits"], labels)

    whole = first_gradient(make_trainer, IgnoresCount(), 1, 8, compute_loss_func=plain_function)
    parts = first_gradient(make_trainer, IgnoresCount(), 4, 2, compute_loss_func=loss_function)
    assert parts[1] == pytest.approx(whole[1], rel=1e-5)
    for one, other in zip(whole[0], parts[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_our_own_metric_of_the_count_is_no_use(make_trainer):
    class Logs(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            self.log_metric("tokens", num_items_in_batch)
            self.log_metric("share", outputs["loss"].detach() / num_items_in_batch)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    trainers = [make_trainer(8, kind, model=IgnoresCount(), gradient_accumulation_steps=2) for kind in (Trainer, Logs)]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    for trainer in trainers:
        trainer.train()
    losses = [log_of(t, "loss") for t in trainers]
    assert losses[0] == losses[1]
    assert next(entry["tokens"] for entry in trainers[1].state.log_history if "tokens" in entry) == 8.0


def test_what_a_user_keeps_of_a_count_is_saved_as_a_plain_tensor():
    kept = torch.tensor(4).as_subclass(ItemCount) * 2
    file = io.BytesIO()
    torch.save({"kept": kept}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["kept"]) is torch.Tensor
    assert type(copy.deepcopy(kept)) is torch.Tensor


def unclear(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / int(num_items_in_batch) ** 0.5


@pytest.mark.parametrize(
    ("change", "divides"),
    [
        (lambda loss: loss, False),
        (lambda loss: loss / 37, True),
        (lambda loss: loss / 37.0, True),
        (lambda loss: loss * (0.5 / 37) * 2, True),
        (lambda loss: (loss.expand(3) / (37 * 4)).mean(), True),
        (lambda loss: 0.7 * loss + 0.3 * loss.exp(), False),
        (lambda loss: loss / 1024, False),
        (lambda loss: loss / torch.tensor(12.347), False),  # a tensor does not come from a number that was read
        (lambda loss: (loss / 37).exp(), False),  # inside a function that is no mean: no division of the loss
        (lambda loss: loss / 37**0.5, None),
        (lambda loss: loss * 0.123456, None),
        (lambda loss: loss.detach() / 37, None),
    ],
)
def test_a_number_that_was_read_is_looked_for_in_the_loss(change, divides):
    assert divides_by_any(change(torch.ones((), requires_grad=True) * 1), [37.0]) is divides


def test_a_loss_of_which_it_cannot_be_seen_is_refused_unless_it_is_said(make_trainer):
    with pytest.raises(ValueError, match=r"read as a number \(8\).*cannot be seen.*set loss_is_scaled_for_ga"):
        first_gradient(make_trainer, IgnoresCount(), 4, 2, compute_loss_func=unclear)
    first_gradient(make_trainer, IgnoresCount(), 1, 8, compute_loss_func=unclear)  # where it makes no difference

    class Says(Trainer):
        loss_is_scaled_for_ga = True

    whole = first_gradient(make_trainer, IgnoresCount(), 1, 8, trainer_class=Says, compute_loss_func=unclear)
    parts = first_gradient(make_trainer, IgnoresCount(), 4, 2, trainer_class=Says, compute_loss_func=unclear)
    assert parts[1] == pytest.approx(whole[1], rel=1e-5)
