"""What the forward of a model takes and returns, and which labels are its targets."""

import pytest
import torch
from support.models import Classifier
from torch import nn

from tr_core.model_io import (
    accepts_count,
    find_label_names,
    kept_columns,
    loss_of,
    main_input_name,
    to_device,
)


class Pretrained(nn.Module):
    """What transformers gives every model: a loss function."""

    loss_function = property(lambda self: None)


class Causal(Pretrained):
    def forward(self, ids, labels=None, **kwargs): ...


def test_which_models_get_the_count_depends_on_their_forward():
    class Says(Causal):
        accepts_loss_kwargs = False

    class Names(nn.Module):
        def forward(self, x, num_items_in_batch=None): ...

    class Fixed(Pretrained):
        def forward(self, x): ...

    class Anything(nn.Module):
        def forward(self, x, **kwargs): ...

    class Declares(Anything):
        accepts_loss_kwargs = True

    class WithLossFunction(Anything):
        @property
        def loss_function(self): ...

    assert [accepts_count(model()) for model in (Names, Declares, WithLossFunction, Causal)] == [True] * 4
    assert [accepts_count(model()) for model in (Says, Fixed, Anything)] == [False] * 3


# Columns, labels and outputs


def test_the_forward_of_a_model_tells_its_columns_and_labels():
    assert find_label_names(Classifier()) == ["labels"]
    assert kept_columns(Classifier(), ["labels"]) == ["x", "labels", "label", "label_ids", "labels"]

    class ForQuestionAnswering(nn.Module):
        def forward(self, input_ids, start_positions, end_positions): ...

    assert find_label_names(ForQuestionAnswering()) == ["start_positions", "end_positions"]


def test_tensors_are_moved_wherever_they_are():
    batch = {"a": torch.ones(1), "b": [torch.ones(1), "text"], "c": (torch.ones(1), {"d": torch.ones(1)})}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["c"][0].is_meta
    assert moved["c"][1]["d"].is_meta
    assert moved["b"][1] == "text"


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"logits": torch.ones(2)}, r"dict returned by the model holds no loss, only \['logits'\]"),
        ((), r"tuple returned by the model holds no loss, only \[\]"),
        (torch.ones(3, 2), r"Tensor returned by the model holds no loss, only \['a tensor of shape \(3, 2\)'\]"),
    ],
)
def test_outputs_without_a_loss_say_what_was_given_and_what_to_change(outputs, message):
    with pytest.raises(ValueError, match=message) as caught:
        loss_of(outputs, {"x": 1})
    assert "the model was given ['x']. Give it labels (see label_names), pass compute_loss_func" in str(caught.value)


def test_losses_are_found_in_dicts_tuples_objects_and_scalars():
    loss = torch.tensor(2.0)

    class Output:
        def __init__(self):
            self.loss = loss

    for outputs in ({"loss": loss}, (loss, torch.ones(2)), [loss], Output(), loss):
        assert loss_of(outputs, {}) is loss


def test_what_is_measured_is_the_first_input_of_the_tokenizer_or_the_main_one_of_the_model():
    class Named(nn.Module):
        main_input_name = "pixel_values"

    class Tokenizer:
        model_input_names = ("ids", "mask")

    assert main_input_name(Named(), Tokenizer()) == "ids"
    assert main_input_name(Named()) == "pixel_values"
    assert main_input_name(nn.Linear(1, 1)) == "input_ids"
