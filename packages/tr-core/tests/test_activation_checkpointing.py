"""Activations that are computed again: less memory, the same bits, and a model that is as before afterwards."""

import copy

import pytest
import torch
from support.data import samples
from support.runs import TORCH, log_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tr_core import TrainerCallback
from tr_core.runtime.activation_checkpointing import checkpointed_activations, repeated_layers

CPU = torch.device("cpu")
EARLY_STOP = {"early_stop": False} if TORCH >= (2, 9) else {}  # an older torch does not take it


class Block(nn.Module):
    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x))))) * scale


class Deep(nn.Module):
    def __init__(self, depth=6, **block):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(**block) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x, labels=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        logits = self.heads[0](x) + self.heads[1](x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def batch(number=16):
    rows = samples(number)
    return {"x": torch.stack([r["x"] for r in rows]), "labels": torch.stack([r["labels"] for r in rows])}


def gradients(model):
    torch.manual_seed(3)
    model.zero_grad()
    model(**batch())["loss"].backward()
    return [p.grad.clone() for p in model.parameters()]


def kept_bytes(model):
    """Count what a forward keeps for the backward."""
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch())
    return kept


def trained(make_trainer, model, **options):
    torch.manual_seed(1)
    trainer = make_trainer(22, model=copy.deepcopy(model), num_train_epochs=2, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"every_n_layers": 2}, {"offload": True}, {"use_reentrant": True}, EARLY_STOP])
def test_gradients_are_those_without_checkpointing_bit_for_bit(dropout, options):
    torch.manual_seed(0)
    model = Deep(dropout=dropout)
    expected = gradients(model)
    with checkpointed_activations(model, CPU, options):
        found = gradients(model)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_a_forward_keeps_a_fraction_for_the_backward():
    model = Deep(depth=12)
    everything = kept_bytes(model)
    with checkpointed_activations(model, CPU):
        all_layers = kept_bytes(model)
    with checkpointed_activations(model, CPU, {"every_n_layers": 2}):
        half = kept_bytes(model)
    assert all_layers < everything / 5
    assert all_layers < half < everything * 0.7


def test_only_the_layers_asked_for_are_computed_again():
    model = Deep(depth=5)
    with checkpointed_activations(model, CPU, {"every_n_layers": 2, **EARLY_STOP}) as names:
        gradients(model)
    assert names == ["blocks.0", "blocks.2", "blocks.4"]
    assert [block.calls for block in model.blocks] == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("block", [{"dropout": 0.3}, {"norm": True}], ids=["dropout", "running statistics"])
def test_a_run_has_the_same_weights_statistics_names_and_losses(make_trainer, block):
    torch.manual_seed(0)
    model = Deep(**block)
    plain, checkpointed = (trained(make_trainer, model, activation_checkpointing=on) for on in (False, True))
    theirs, mine = plain.model.state_dict(), checkpointed.model.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert log_of(plain, "loss") == log_of(checkpointed, "loss")
    assert mine.get("blocks.0.norm.num_batches_tracked", 12) == 12  # of each batch once


class Watch(TrainerCallback):
    """Notes the layers' classes in training, and fails in the second step if it is to."""

    def __init__(self, fails=False):
        self.fails, self.classes = fails, set()

    def on_step_end(self, args, state, control, model, **kwargs):
        self.classes.add(type(model.blocks[0]))
        if self.fails:
            raise KeyError("on purpose")


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_the_layers_are_of_their_own_class_again(make_trainer, fails):
    watch = Watch(fails)
    trainer = make_trainer(8, model=Deep(), activation_checkpointing=True, callbacks=[watch])
    if fails:
        with pytest.raises(KeyError):
            trainer.train()
    else:
        trainer.train()
    (during,) = watch.classes
    assert issubclass(during, Block)
    assert during is not Block
    assert {type(block) for block in trainer.model.blocks} == {Block}


def test_a_copy_of_a_checkpointed_layer_computes_with_its_own_weights():
    model = Deep()
    with checkpointed_activations(model, CPU):
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.data.zero_()
        found = other(**batch())["logits"]
    assert found.eq(0).all()


def test_evaluation_computes_nothing_twice(make_trained):
    model = Deep()
    make_trained(8, model=model, activation_checkpointing=True, eval_dataset=samples(4), eval_strategy="epoch")
    # two steps twice each, one batch of evaluation
    assert model.blocks[0].calls == 5


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())
        self.decoder = nn.ModuleList(nn.Sequential(Block(), nn.Tanh()) for _ in range(3))
        self.shared = nn.ModuleList([self.encoder[0]] * 2)
        self.mixed = nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def test_repeated_layers_are_those_of_all_stacks_each_once():
    names = ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"]
    assert list(repeated_layers(EncoderDecoder())) == names
    assert list(repeated_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == ["0", "1"]
    assert list(repeated_layers(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)))


def test_a_model_with_nothing_to_checkpoint_says_so(make_trainer):
    trainer = make_trainer(8, activation_checkpointing=True)
    with pytest.raises(
        ValueError, match="Classifier has nothing to checkpoint: neither activation_checkpointing_enable"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"every": 2},
            r"activation_checkpointing_kwargs has \['every'\], which are not known; it takes .*every_n_layers",
        ),
        ({"every_n_layers": 0}, "every_n_layers=0; it needs a whole number from 1"),
    ],
)
def test_an_unknown_option_is_refused_at_construction(make_trainer, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(8, model=Deep(), activation_checkpointing=True, activation_checkpointing_kwargs=options)


def test_reentrant_checkpointing_that_would_lose_gradients_is_refused():
    model = nn.Sequential(Block(), Block())
    with (
        checkpointed_activations(model, CPU, {"use_reentrant": True}),
        pytest.raises(ValueError, match="use_reentrant=True would lose gradients of Block"),
    ):
        model(torch.randn(2, 8))
    with (
        pytest.raises(ValueError, match="would count every batch twice in the running statistics of Block"),
        checkpointed_activations(Deep(norm=True), CPU, {"use_reentrant": True}),
    ):
        pass


class Switches(Deep):
    """Has methods to switch checkpointing, as models of transformers have, by the newer or the older name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.calls.append(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self):
        self.calls.append("disabled")


class SwitchesToo(Switches):
    def activation_checkpointing_enable(self, activation_checkpointing_kwargs=None, every_n_layers=1, offload=False):
        self.calls.append((activation_checkpointing_kwargs, every_n_layers, offload))

    def activation_checkpointing_disable(self):
        self.calls.append("disabled too")


def test_a_model_with_methods_for_it_is_switched_on_and_off_by_them():
    older, newer = Switches(), SwitchesToo()
    with checkpointed_activations(older, CPU):
        pass
    with checkpointed_activations(newer, CPU, {"every_n_layers": 3, "preserve_rng_state": False}):
        pass
    assert older.calls == [{"use_reentrant": False}, "disabled"]
    assert newer.calls == [({"use_reentrant": False, "preserve_rng_state": False}, 3, False), "disabled too"]


@pytest.mark.parametrize(("device", "offload"), [("cpu", False), ("cuda", True)])
def test_a_model_is_asked_to_move_what_it_keeps_only_from_another_device_than_the_host(device, offload):
    model = SwitchesToo()
    with checkpointed_activations(model, torch.device(device), {"offload": True}):
        pass
    assert model.calls[0] == ({"use_reentrant": False}, 1, offload)


def test_options_that_the_methods_of_a_model_do_not_take_are_refused():
    with (
        pytest.raises(ValueError, match="gradient_checkpointing_enable takes no every_n_layers"),
        checkpointed_activations(Switches(), CPU, {"every_n_layers": 3}),
    ):
        pass
