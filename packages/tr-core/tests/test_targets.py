"""Which labels are targets of a model, read off models as transformers writes them, without transformers."""

from types import SimpleNamespace

import pytest
from torch import nn
from torch.nn import functional as F

from tr_core.model_io import accepts_count, averages_over_targets, shifts_targets
from tr_core.signatures import takes_argument


def named(name):
    def function(logits, labels, **kwargs): ...

    function.__name__ = name
    return staticmethod(function)


class Pretrained(nn.Module):
    """What transformers gives every model: a loss function, chosen by what is read from its class."""

    loss_type = None
    function = named("ForCausalLMLoss")

    @property
    def loss_function(self):
        return self.function


class Causal(Pretrained):
    def forward(self, ids, labels=None, **kwargs):
        return self.loss_function(ids, labels, **kwargs)


class Masked(Causal):
    function = named("ForMaskedLMLoss")


class OwnShifted(Pretrained):
    loss_type = "ForCausalLM"

    def forward(self, ids, labels=None):
        shift_labels = labels[..., 1:]
        return F.cross_entropy(ids, shift_labels)


class Own(Pretrained):
    loss_type = "ForCausalLM"

    def forward(self, ids, labels=None):
        return F.cross_entropy(ids, labels)


class OwnModule(Pretrained):
    def forward(self, ids, labels=None):
        return nn.CrossEntropyLoss()(ids, labels)


class Unreduced(Pretrained):
    def forward(self, ids, labels=None):
        return F.cross_entropy(ids, labels, reduction="none").sum()


class UnreducedModule(Pretrained):
    def forward(self, ids, labels=None):
        kind = "none"
        return nn.CrossEntropyLoss(reduction=kind)(ids, labels).sum()


class Regression(Pretrained):
    def forward(self, ids, labels=None):
        return F.mse_loss(ids, labels)


class Typed(Regression):
    loss_type = "ForCausalLM"


class CallsParent(Causal):
    def forward(self, ids, labels=None, **kwargs):
        return super().forward(ids, labels, **kwargs)


class CallsParentsOwn(OwnShifted):
    def forward(self, ids, labels=None):
        return super().forward(ids, labels)


class Replaces(OwnShifted):
    def forward(self, ids, labels=None):
        return F.cross_entropy(ids, labels)


class InAMethod(Pretrained):
    def forward(self, ids, labels=None):
        return self.compute_loss(ids, labels)

    def compute_loss(self, ids, labels):
        shift_labels = labels[..., 1:]
        return F.nll_loss(ids, shift_labels)


class ElsewhereThanLoss(Pretrained):
    def forward(self, ids, labels=None):
        return self.head(ids, labels)

    def head(self, ids, labels):
        return F.cross_entropy(ids, labels)


class NotOfTransformers(nn.Module):
    def forward(self, ids, labels=None):
        shift_labels = labels[..., 1:]
        return F.cross_entropy(ids, shift_labels)


def encoder_decoder():
    model = Causal()
    model.config = SimpleNamespace(is_encoder_decoder=True)
    return model


def with_another_forward():
    model = Causal()
    model.forward = lambda ids, labels=None: F.cross_entropy(ids, labels)
    return model


@pytest.mark.parametrize(
    ("make", "shifts", "averages"),
    [
        (Causal, True, False),
        (Masked, False, False),
        (OwnShifted, True, True),
        (Own, False, True),
        (OwnModule, False, True),
        (Unreduced, False, False),
        (UnreducedModule, False, False),
        (Regression, False, False),
        (Typed, True, False),
        (CallsParent, True, False),
        (CallsParentsOwn, True, True),
        (Replaces, False, True),
        (InAMethod, True, True),
        (ElsewhereThanLoss, False, False),
        (NotOfTransformers, False, False),
        (encoder_decoder, False, False),
        (with_another_forward, True, False),  # what wraps a forward may well call it
    ],
)
def test_what_a_forward_calls_says_whether_labels_are_shifted_and_averaged(make, shifts, averages):
    model = make()
    assert shifts_targets(model) is shifts
    assert averages_over_targets(model) is averages


def test_a_model_that_says_whether_it_takes_the_count_is_believed():
    class Says(Causal):
        accepts_loss_kwargs = False

    class Names(nn.Module):
        def forward(self, x, num_items_in_batch=None): ...

    class Fixed(Pretrained):
        def forward(self, x): ...

    class Anything(nn.Module):
        def forward(self, x, **kwargs): ...

    assert [accepts_count(model()) for model in (Says, Names, Fixed, Anything, Causal)] == [
        *(False, True, False, False, True),
    ]


def test_an_argument_is_taken_by_its_name_or_by_keywords_of_any_name():
    assert takes_argument(lambda a, count=None: None, "count")
    assert takes_argument(lambda **others: None, "count")
    assert not takes_argument(lambda *count: None, "other")
    assert not takes_argument(lambda a: None, "count")
