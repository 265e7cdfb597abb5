"""What a loss is divided by is seen in its value, in whatever form it is divided, and looking leaves no trace."""

import random
import warnings
from collections import defaultdict
from decimal import Decimal

import numpy as np
import pytest
import torch
from support.data import samples
from support.models import Base, CountedSum, IgnoresCount
from support.runs import log_of
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tr_core import SingleDevice, Trainer, TrainerCallback
from tr_core.loss import Division, LossRule, Pair, compare

SEEN, calls_of_all = [], []  # what is looked at leaves no trace in a closure
COUNT = 8  # of the targets of a step


def rows():
    """Return 12 samples, of which micro-batches of 3 have 3, 2, 1 and 2 targets."""
    found = samples(12)
    for index in (4, 6, 7, 11):
        found[index]["labels"] = torch.tensor(-100)
    return found


def note(value):
    SEEN.append(value)


# What is seen is a value: of each way to look and to divide that may change one, a form. `fuzz_losses.py` draws others.
# Looking at the count: of the mean of a micro-batch and the count


LOOKS = {
    "print": lambda loss, n: (print(n), loss)[1],
    "int": lambda loss, n: (note(int(n)), loss)[1],
    "item": lambda loss, n: (note(n.item()), loss)[1],
    "bool": lambda loss, n: loss if n else loss * 0.0,
    "torch.equal": lambda loss, n: (note(torch.equal(n, n)), loss)[1],
    "arithmetic apart": lambda loss, n: (note(2 * n / 3 + 1), loss)[1],
    "a metric of the loss": lambda loss, n: (note(loss.detach() / n), loss)[1],
    "zeros_like": lambda loss, n: loss + torch.zeros_like(n),
    "a factor of one's own": lambda loss, n: (note(int(n)), (0.7 * loss + 0.3 * loss) * 2.0 / 2)[1],
    "the number of targets by chance": lambda loss, n: loss / 8 * 8,
    "there and back": lambda loss, n: loss / n * n,
    "minus itself": lambda loss, n: loss + (n - n),
    "the smaller one": lambda loss, n: loss / min(int(n), 1),
}


# Dividing by it: of the losses of a micro-batch's targets and the count


class OwnMean(torch.autograd.Function):
    """A kernel of one's own: nothing in it is seen by autograd."""

    @staticmethod
    def forward(ctx, losses, count):
        ctx.save_for_backward(losses, count)
        return losses.sum() / count

    @staticmethod
    def backward(ctx, gradient):
        losses, count = ctx.saved_tensors
        return gradient * torch.ones_like(losses) / count, None


class Divides(nn.Module):
    def forward(self, total, n):
        return total / n


def scripted(total, n):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions advise against it
        module = torch.jit.script(Divides())
    return module(total, n)


def by_hand_filled(losses, n):
    result = losses.new_zeros(2)
    result[0] = losses.sum() / n
    return result.sum()


def padded(losses, n):
    return torch.cat([losses, losses.new_zeros(max(int(n) - len(losses), 0))]).mean()


def subtracted(losses, n):
    total, number = losses.sum(), 0
    for _ in range(n):
        number += 1
    return total / number


OF_LOSSES = {
    "written by index": by_hand_filled,
    "vmap": lambda s, n: torch.vmap(lambda each: each / n)(s).sum(),
    "own function": lambda s, n: OwnMean.apply(s, n),
    "reentrant checkpoint": lambda s, n: checkpoint(lambda x: x.sum() / n.item(), s, use_reentrant=True),
    "checkpoint": lambda s, n: checkpoint(lambda x: x.sum() / n, s, use_reentrant=False),
    "padded to the count": padded,
    "counted up": subtracted,
    "mean of shares": lambda s, n: s.mean() * (len(s) / n),
}

DIVISIONS = {
    "/": lambda total, n: total / n,
    "/=": lambda total, n: total.__itruediv__(n),
    "div_": lambda total, n: (total.div_(n), total)[1],
    "reciprocal": lambda total, n: total * n.reciprocal(),
    "clamped": lambda total, n: total / torch.clamp(n, min=1),
    "plus epsilon": lambda total, n: total / (n + 1e-8),
    "then more": lambda total, n: (total / n).clone().float().squeeze().mean(),
    "item": lambda total, n: total / n.item(),
    "numpy": lambda total, n: total / float(n.cpu().numpy()),
    "jit.script": scripted,
    "logarithms": lambda total, n: torch.exp(torch.log(total) - torch.log(n)),
    "decimal": lambda total, n: total * float(1 / Decimal(n.item())),
    "double": lambda total, n: (total.double() / n).float(),
}

FORMS = [(f"look: {name}", form, "mean") for name, form in LOOKS.items()]
FORMS += [(f"division: {name}", form, "sum") for name, form in DIVISIONS.items()]
FORMS += [(f"division of losses: {name}", form, "none") for name, form in OF_LOSSES.items()]


def of(form, reduction):
    def loss_function(outputs, labels, num_items_in_batch=None):
        loss = nn.functional.cross_entropy(outputs["logits"], labels, reduction=reduction)
        return form(loss, num_items_in_batch)

    return loss_function


class Keep(TrainerCallback):
    def __init__(self):
        self.gradient = None

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if self.gradient is None:
            self.gradient = torch.cat([p.grad.flatten() for p in model.parameters()])


def build(make_trainer, trainer_class=Trainer, *, model=None, accumulation=4, **parts):
    torch.manual_seed(3)
    keep = Keep()
    options = {
        "train_dataset": rows(),
        "per_device_train_batch_size": 3,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "callbacks": [keep, *parts.pop("callbacks", [])],
        **parts,
    }
    model = IgnoresCount() if model is None else model
    trainer = make_trainer(12, trainer_class, model=model, gradient_accumulation_steps=accumulation, **options)
    trainer.keep = keep
    return trainer


def by_hand(*, divides, bf16=False):
    """Return the gradient and the loss of the first step, in a loop of one's own."""
    torch.manual_seed(3)
    model, total = IgnoresCount(), 0.0
    for start in range(0, 12, 3):
        batch = {name: torch.stack([row[name] for row in rows()[start : start + 3]]) for name in ("x", "labels")}
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            reduction = "sum" if divides else "mean"
            loss = nn.functional.cross_entropy(model.layers(batch["x"]), batch["labels"], reduction=reduction)
            loss = loss / (COUNT if divides else 4)
        loss.backward()
        total += loss.item()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), total


# The gradients of four micro-batches are sums of the same products in the same order but for the division, whose place
# in them moves each by some roundings, of 6e-8 each, or of 4e-3 each under autocast.
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize(("form", "reduction"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
def test_gradients_are_those_of_a_loop_by_hand(make_trainer, form, reduction, bf16):
    trainer = build(make_trainer, compute_loss_func=of(form, reduction), bf16=bf16)
    trainer.train()
    gradient, loss = by_hand(divides=reduction != "mean", bf16=bf16)
    assert log_of(trainer, "loss")[0] == pytest.approx(loss, rel=1e-2 if bf16 else 1e-5)
    close = {"rtol": 4e-2, "atol": 4e-3} if bf16 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(trainer.keep.gradient, gradient, **close)


# What is decided by value


def pair(once, twice, dtype=torch.float32):
    return Pair(8.0, once, twice, torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize(
    ("pairs", "answer"),
    [
        ([pair(1.0, 0.5)], "counted"),
        ([pair(-1.0, -0.5)], "counted"),
        ([pair(1.0, 1.0)], "mean"),
        ([pair(1.0, 0.5 + 3e-6)], "counted"),
        ([pair(1.0, 0.5 + 5e-6)], "unclear"),
        ([pair(1.0, 1.02, torch.bfloat16)], "mean"),
        ([pair(1.0, 1.04, torch.bfloat16)], "unclear"),
        ([pair(1.0, 0.6)], "unclear"),
        ([pair(1.0, 2.0)], "unclear"),
        ([pair(1.0, -0.5)], "unclear"),
        ([pair(1.0, 0.501), pair(1.0005, 0.5)], "counted"),  # it differs by itself by 1e-3
        ([pair(1.0, 0.9), pair(0.5, 1.1)], "unclear"),  # so much that it says nothing
        ([pair(0.0, 0.0)], "zero"),
        ([pair(0.0, 1.0)], "unclear"),
        ([pair(float("nan"), 1.0)], None),
        ([pair(float("inf"), float("inf"))], None),
        ([Pair(8.0, float("nan"), float("nan"), 0.0)], None),
    ],
)
def test_two_losses_say_what_they_are_divided_by(pairs, answer):
    assert compare(pairs) == answer


class OfTwo(SingleDevice):
    """One of two ranks, of which the other one sees what it is told to."""

    world_size = 2

    def __init__(self, other):
        super().__init__("cpu")
        self.other = other

    def gather_objects(self, value):
        return [value, (self.other, value[1])]


@pytest.mark.parametrize(
    ("own", "other", "division"),
    [
        (pair(1.0, 0.5), "counted", Division.COUNTED),
        (pair(1.0, 1.0), "mean", Division.MEAN),
        (pair(0.0, 0.0), "counted", Division.COUNTED),
        (pair(float("nan"), 1.0), "mean", Division.MEAN),
        (pair(1.0, 0.5), None, Division.COUNTED),
        (pair(1.0, 0.5), "mean", None),
        (pair(1.0, 1.0), "unclear", None),
    ],
)
def test_ranks_agree_on_what_any_of_them_saw(own, other, division):
    rule, looked = LossRule(IgnoresCount(), None, OfTwo(other)), []

    def look():
        looked.append(own)
        return own

    if division is None:
        with pytest.raises(ValueError, match="neither half of the loss nor the same"):
            rule.observe(look, has_targets=True, is_scaled=None)
        assert len(looked) == 2
        return
    rule.observe(look, has_targets=True, is_scaled=None)
    assert rule.division(True, 2) is division
    assert not rule.asks(2, None)


def add_up(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def partly(outputs, labels, num_items_in_batch=None):
    return add_up(outputs, labels, num_items_in_batch) + 0.1


def rooted(outputs, labels, num_items_in_batch=None):
    loss = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return loss / int(num_items_in_batch) ** 0.5


def drawn(outputs, labels, num_items_in_batch=None):
    return add_up(outputs, labels, num_items_in_batch) * (1 + int.from_bytes(random.SystemRandom().randbytes(2)))


@pytest.mark.parametrize("function", [partly, rooted, drawn])
def test_a_loss_that_is_neither_is_refused_unless_it_is_declared(make_trainer, function):
    words = r"neither half of the loss nor the same.* with 8, .* with 16\. Set loss_is_scaled_for_ga of the Trainer"
    with pytest.raises(ValueError, match=words):
        build(make_trainer, compute_loss_func=function).train()
    build(make_trainer, compute_loss_func=function, accumulation=1).train()  # where it makes no difference
    for scaled in (True, False):
        declares = type("Declares", (Trainer,), {"loss_is_scaled_for_ga": scaled})
        build(make_trainer, declares, compute_loss_func=function).train()


def test_a_loss_of_zero_that_has_gradients_is_refused_where_nothing_else_was_seen(make_trainer):
    def surrogate(outputs, labels, num_items_in_batch=None):
        total = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return (total - total.detach()) / num_items_in_batch

    with pytest.raises(ValueError, match="the loss of this micro-batch is 0 and its gradients are not.*Set loss_is_sc"):
        build(make_trainer, compute_loss_func=surrogate).train()


@pytest.mark.parametrize("first", [0.0, float("nan")])
def test_a_loss_that_says_nothing_leaves_it_to_the_next_one(make_trainer, first):
    calls_of_all.clear()

    def late(outputs, labels, num_items_in_batch=None):
        calls_of_all.append(int(num_items_in_batch))
        loss = add_up(outputs, labels, num_items_in_batch)
        # Three calls of the first micro-batch: no gradient from it, and nothing to see.
        return (loss * 0.0 if first == 0.0 else loss.detach() * first + loss * 0.0) if len(calls_of_all) <= 3 else loss

    trainer = build(make_trainer, compute_loss_func=late)
    trainer.train()
    assert calls_of_all == [8, 16, 8, 8, 16, 8, 8, 8]
    torch.manual_seed(3)
    model = IgnoresCount()
    batch = {name: torch.stack([row[name] for row in rows()[3:]]) for name in ("x", "labels")}
    add_up({"logits": model.layers(batch["x"])}, batch["labels"], COUNT).backward()
    if first == 0.0:
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(trainer.keep.gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_micro_batch_without_a_target_says_nothing(make_trainer):
    empty = [{**row, "labels": torch.tensor(-100)} if index < 3 else row for index, row in enumerate(samples(12))]
    trainer = build(make_trainer, compute_loss_func=add_up, train_dataset=empty)
    trainer.train()
    torch.manual_seed(3)
    model = IgnoresCount()
    batch = {name: torch.stack([row[name] for row in empty]) for name in ("x", "labels")}
    nn.functional.cross_entropy(model.layers(batch["x"]), batch["labels"]).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(trainer.keep.gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_loss_of_zero_with_gradients_says_nothing_either_where_there_is_no_target(make_trainer):
    def with_a_surrogate(outputs, labels, num_items_in_batch=None):
        drift = outputs["logits"].sum() * 0.01
        return add_up(outputs, labels, num_items_in_batch) + drift - drift.detach()

    empty = [{**row, "labels": torch.tensor(-100)} if index < 3 else row for index, row in enumerate(samples(12))]
    trainer = build(make_trainer, compute_loss_func=with_a_surrogate, train_dataset=empty)
    trainer.train()
    assert trainer.state.global_step > 0


# When it is looked at


def add_up_noting(outputs, labels, num_items_in_batch=None):
    calls_of_all.append(int(num_items_in_batch))
    return add_up(outputs, labels, num_items_in_batch)


def mean_noting(outputs, labels, num_items_in_batch=None):
    calls_of_all.append(int(num_items_in_batch))
    return nn.functional.cross_entropy(outputs["logits"], labels)


def test_only_the_first_micro_batch_of_a_run_is_looked_at_and_each_run_looks_again(make_trainer):
    calls_of_all.clear()
    trainer = build(make_trainer, compute_loss_func=add_up_noting, num_train_epochs=2)
    for _ in range(2):
        trainer.train()
    assert calls_of_all == [8, 16, *[8] * 8] * 2


def test_nothing_is_looked_at_where_it_makes_no_difference_or_is_declared(make_trainer):
    class Declares(Trainer):
        loss_is_scaled_for_ga = False

    calls_of_all.clear()
    build(make_trainer, compute_loss_func=add_up_noting, accumulation=1).train()
    build(make_trainer, Declares, compute_loss_func=add_up_noting).train()
    assert len(calls_of_all) == 8
    assert 16 not in calls_of_all


def test_a_loss_function_that_is_assigned_during_a_run_is_looked_at(make_trainer):
    class Changes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.compute_loss_func = mean_noting

    calls_of_all.clear()
    parts = {"compute_loss_func": add_up_noting, "callbacks": [Changes()], "num_train_epochs": 2, "learning_rate": 0.0}
    trainer = build(make_trainer, **parts)
    trainer.train()
    assert calls_of_all == [8, 16, 8, 8, 8, 8] * 2
    assert log_of(trainer, "loss")[1] == pytest.approx(by_hand(divides=False)[1], rel=1e-5)


# What looking leaves as it was


class Stateful(Base):
    """Draws numbers of every kind, keeps statistics and counts, and puts off what it needs until it is called."""

    accepts_loss_kwargs = True

    def __init__(self):
        super().__init__(dropout=0.5)
        self.norm = nn.BatchNorm1d(8)
        self.generator = torch.Generator().manual_seed(1)
        self.calls, self.sizes, self.total = 0, [], torch.zeros(())
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, labels=None, num_items_in_batch=None):
        if self.calls == 0:
            self.mask = torch.rand(8, generator=self.generator)
            self.register_buffer("late", torch.rand(8))
        self.calls += 1
        self.sizes.append(len(x))
        self.total += len(x)
        self.seen = self.seen + len(x)
        noise = random.random() + np.random.rand() + torch.rand(8, generator=self.generator)
        logits = self.layers(self.norm(x) * self.mask + noise + self.late)
        if num_items_in_batch is None:
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / num_items_in_batch, "logits": logits}


class Notes(Trainer):
    """Keeps what a Trainer of a user would: numbers, lists within dicts, and what it takes from a batch."""

    def __init__(self, *args, **kwargs):
        self.count, self.kept, self.sum = 0, defaultdict(lambda: defaultdict(list)), torch.zeros(())
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.count += 1
        self.log_metric("count", self.count)
        self.log({"mine": self.count})
        labels = inputs.pop("labels")
        inputs["x"].add_(1.0)
        outputs = model(inputs["x"], labels=labels, num_items_in_batch=num_items_in_batch)
        self.kept["train"]["loss"].append(outputs["loss"].item())
        self.sum += outputs["loss"].detach()
        self.state.num_input_tokens_seen += len(labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Declared(Notes):
    loss_is_scaled_for_ga = True


def test_a_run_that_was_looked_at_ends_as_one_that_was_not_to_the_bit(make_trainer):
    ends = []
    for kind in (Notes, Declared):
        random.seed(5)
        np.random.seed(5)
        hooked = []
        torch.manual_seed(3)
        model = Stateful()
        model.layers.register_forward_hook(lambda module, args, output, hooked=hooked: hooked.append(len(args[0])))
        trainer = build(make_trainer, kind, model=model, num_train_epochs=2)
        trainer.train()
        assert hooked == [3] * 8
        ends.append((trainer, model))
    (one, mine), (other, theirs) = ends
    for name, value in mine.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    assert (mine.calls, mine.sizes, mine.total) == (theirs.calls, theirs.sizes, theirs.total) == (8, [3] * 8, 24.0)
    assert (one.count, one.kept, one.sum) == (other.count, other.kept, other.sum)
    assert one.state.num_input_tokens_seen == other.state.num_input_tokens_seen == 24
    assert log_of(one, "mine") == log_of(other, "mine") == [*range(1, 9)]
    assert log_of(one, "loss") == log_of(other, "loss")
    assert log_of(one, "count") == log_of(other, "count")


def test_what_a_loss_function_keeps_is_as_if_it_was_called_once(make_trainer):
    calls, number = [], 0

    def own(outputs, labels, num_items_in_batch=None):
        nonlocal number
        number += 1
        calls.append(number)
        return add_up(outputs, labels, num_items_in_batch)

    build(make_trainer, compute_loss_func=own).train()
    assert calls == [1, 2, 3, 4]


def test_a_loss_that_needs_gradients_is_looked_at_with_them(make_trainer):
    class Penalised(Base):
        accepts_loss_kwargs = True

        def forward(self, x, labels=None, num_items_in_batch=None):
            x = x.detach().requires_grad_()
            logits = self.layers(x)
            (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
            total = nn.functional.cross_entropy(logits, labels, reduction="sum") + slope.square().sum()
            return {"loss": total / num_items_in_batch, "logits": logits}

    trainer = build(make_trainer, model=Penalised())
    trainer.train()
    assert trainer.loss_rule.observed is True


def test_a_hook_that_the_forward_needs_is_called_where_it_fails_without(make_trainer):
    model = CountedSum()
    model.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    model.layers.register_forward_pre_hook(lambda module, args: (args[0][:, :4],))
    trainer = build(make_trainer, model=model)
    trainer.train()
    assert trainer.loss_rule.observed is True


def test_a_part_that_is_a_script_keeps_its_buffers(make_trainer):
    class Scripted(CountedSum):
        def __init__(self):
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.norm = torch.jit.script(nn.BatchNorm1d(8))

        def forward(self, x, labels=None, num_items_in_batch=None):
            return super().forward(self.norm(x), labels, num_items_in_batch)

    model = Scripted()
    build(make_trainer, model=model).train()
    assert model.norm.num_batches_tracked == 4


def test_a_hook_that_a_model_adds_in_its_first_forward_is_there_once(make_trainer):
    """As models of transformers do that collect hidden states, and note it in an attribute."""

    class Collects(CountedSum):
        has_hook, collected = False, []

        def forward(self, x, labels=None, num_items_in_batch=None):
            if not self.has_hook:
                self.layers[0].register_forward_hook(lambda module, args, output: self.collected.append(output))
                self.has_hook = True
            self.collected.clear()
            outputs = super().forward(x, labels, num_items_in_batch)
            counts.append(len(self.collected))
            return outputs

    counts, model = [], Collects()
    build(make_trainer, model=model).train()
    assert model.has_hook
    assert set(counts) == {1}


def test_hooks_of_torch_stay_while_a_loss_is_looked_at(make_trainer):
    model = CountedSum()
    prune.l1_unstructured(model.layers[0], "weight", 0.5)
    trainer = build(make_trainer, model=model)
    trainer.train()
    assert trainer.loss_rule.observed is True
    assert (model.layers[0].weight == 0).sum() == 64


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("divides", [False, True])
def test_a_compiled_loss_is_seen_by_value_and_compiled_once(make_trainer, backend, divides):
    pytest.importorskip("torch._dynamo").reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    @torch.compile(backend=counting, fullgraph=True)
    def function(logits, labels, count):
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum" if divides else "mean")
        return loss / count if divides else loss

    def own(outputs, labels, num_items_in_batch=None):
        return function(outputs["logits"], labels, num_items_in_batch)

    trainer = build(make_trainer, compute_loss_func=own)
    trainer.train()
    assert len(graphs) == 1
    torch.testing.assert_close(trainer.keep.gradient, by_hand(divides=divides)[0], rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_weights_that_autocast_cast_while_looking_keep_their_gradients(make_trainer):
    gradients = []
    for accumulation in (1, 4):
        with torch.autocast("cpu", torch.bfloat16):
            trainer = build(make_trainer, model=CountedSum(), accumulation=accumulation)
            trainer.train()
        gradients.append(trainer.keep.gradient)
    assert all(gradient.any() for gradient in gradients)


# Evaluation


def sparse(number):
    found = samples(number)
    for index, row in enumerate(found):
        row["labels"] = torch.tensor([index % 3, *([(index + 1) % 3 if index % 2 else -100] * 3)])
    return found


class Repeats(Base):
    accepts_loss_kwargs = True

    def forward(self, x, labels=None, **kwargs):
        return {"logits": self.layers(x)[:, None].expand(-1, 4, -1).transpose(1, 2)}


EVALUATED = {
    "int": lambda total, n: total / int(n),
    "tensor": lambda total, n: total / torch.tensor(int(n)),
    "logarithms": lambda total, n: torch.exp(torch.log(total) - torch.log(n)),
    "script": scripted,
}


@pytest.mark.parametrize("name", EVALUATED)
def test_an_evaluation_is_weighed_by_what_its_loss_is_divided_by(make_trainer, name):
    data = sparse(7)
    trainer = make_trainer(
        model=Repeats(),
        eval_dataset=data,
        per_device_eval_batch_size=2,
        compute_loss_func=of(EVALUATED[name], "sum"),
    )
    calls = []
    trainer.model.register_forward_hook(lambda *args: calls.append(1))
    labels = torch.stack([row["labels"] for row in data])
    with torch.no_grad():
        logits = trainer.model.eval()(torch.stack([row["x"] for row in data]))["logits"]
        wanted = nn.functional.cross_entropy(logits, labels).item()
    del calls[:]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    assert len(calls) == 4


def test_an_evaluation_whose_loss_is_neither_is_refused_where_it_matters(make_trainer):
    options = {"compute_loss_func": rooted, "per_device_eval_batch_size": 2}
    trainer = make_trainer(model=Repeats(), eval_dataset=sparse(5), **options)
    with pytest.raises(ValueError, match="cannot be seen: twice the num_items_in_batch gives neither half"):
        trainer.evaluate()
    even = [row | {"labels": row["labels"].clamp(min=0)} for row in sparse(6)]
    assert make_trainer(model=Repeats(), eval_dataset=even, **options).evaluate()["eval_loss"] > 0


def test_a_first_batch_without_targets_leaves_an_evaluation_to_the_next(make_trainer):
    data = sparse(7)
    for row in data[:2]:
        row["labels"] = torch.full((4,), -100)
    trainer = make_trainer(
        model=Repeats(),
        eval_dataset=data,
        per_device_eval_batch_size=2,
        compute_loss_func=of(lambda s, n: s / n, "sum"),
    )
    trainer.evaluate()
    assert trainer.loss_rule.evaluated is True
