"""What a checkpoint says of the settings it was trained with, and the fingerprint of frozen weights."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_core.checkpoint import settings
from tr_core.checkpoint.settings import check_fingerprint, fingerprint, shaping_arguments


@pytest.fixture(autouse=True)
def adapters_are_known(monkeypatch):
    """Take every model here for one with an adapter: what is frozen in it decides."""
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=nn.Module))


def frozen(weight, **others):
    model = nn.Module()
    model.weight = nn.Parameter(weight, requires_grad=False)
    for name, value in others.items():
        model.register_parameter(name, nn.Parameter(value))
    return model


def digest(weight, **others):
    return fingerprint(frozen(weight, **others))["digest"]


def blocks_moved(weight, size):
    """Return the same numbers with the first two blocks of `size` of them exchanged."""
    return torch.cat([weight[size : 2 * size], weight[:size], weight[2 * size :]])


def test_a_model_without_an_adapter_has_no_fingerprint(monkeypatch):
    monkeypatch.delitem(sys.modules, "peft")
    assert fingerprint(frozen(torch.ones(3))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_change_places_change_the_fingerprint(monkeypatch, dtype):
    monkeypatch.setattr(settings, "_CHUNK_BYTES", {"cpu": 64})
    weight = torch.arange(1, 101, dtype=torch.float32).to(dtype)
    size = 64 // dtype.itemsize
    assert digest(weight) == digest(weight.clone())
    assert digest(blocks_moved(weight, size)) != digest(weight)
    assert digest(blocks_moved(weight, 8 // dtype.itemsize)) != digest(weight)  # words within a block


def test_real_blocks_that_change_places_change_the_fingerprint():
    size = settings._CHUNK_BYTES["cpu"] // 4
    weight = torch.arange(2 * size + 3, dtype=torch.int32).view(torch.float32)
    assert digest(weight) == digest(weight)
    assert digest(blocks_moved(weight, size)) != digest(weight)


@pytest.mark.parametrize("shape", [(256, 256), (2048, 2048)])
def test_weights_that_all_change_alike_change_the_fingerprint(shape):
    """What doubles all weights adds the same to every word: 2^k such words cancel where words are only weighted."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = {digest(weight), digest(2 * weight), digest(-weight), digest(4 * weight)}
    assert len(found) == 4
    assert digest(torch.ones(shape)) != digest(torch.full(shape, 2.0))


@pytest.mark.parametrize("number", [0, 15, 16, 31, 99])
def test_a_change_of_any_one_bit_changes_the_fingerprint(monkeypatch, number):
    monkeypatch.setattr(settings, "_CHUNK_BYTES", {"cpu": 64})
    weight = torch.randn(101, generator=torch.Generator().manual_seed(0))
    changed = weight.clone()
    changed.view(torch.int32)[number] ^= 1
    assert digest(changed) != digest(weight)


def test_blocks_of_zeros_count_by_how_many_they_are(monkeypatch):
    monkeypatch.setattr(settings, "_CHUNK_BYTES", {"cpu": 64})
    assert digest(torch.zeros(16)) != digest(torch.zeros(32))
    assert digest(torch.zeros(4, 8)) != digest(torch.zeros(8, 4))


def test_what_is_trained_does_not_count_and_what_is_frozen_is_described():
    found = fingerprint(frozen(torch.ones(3, dtype=torch.bfloat16), trained=torch.ones(5)))
    assert found == {"digest": found["digest"], "weights": 3, "dtypes": ["bfloat16"]}
    assert digest(torch.ones(3, dtype=torch.bfloat16), trained=torch.zeros(5)) == found["digest"]
    assert digest(torch.ones(3)) != found["digest"]


def test_where_an_adapter_sits_does_not_count():
    plain, wrapped = nn.Module(), nn.Module()
    for model, name in ((plain, "weight"), (wrapped, "base_layer")):
        layer = frozen(torch.ones(2)) if name == "weight" else nn.Module()
        if name == "base_layer":
            layer.base_layer = frozen(torch.ones(2))
        model.layer = layer
    assert fingerprint(plain) == fingerprint(wrapped)


def test_shards_are_looked_at_whole():
    whole = torch.arange(6.0)

    @contextmanager
    def gathered(parameter):
        yield whole

    assert fingerprint(frozen(whole[:3]), gathered) == fingerprint(frozen(whole))


def test_other_frozen_weights_are_refused_with_what_is_known_of_them():
    then, now = fingerprint(frozen(torch.ones(3))), fingerprint(frozen(torch.zeros(3)))
    check_fingerprint(then, dict(then))
    check_fingerprint(None, now)
    check_fingerprint(then, None)
    with pytest.raises(ValueError, match=r"not those that it was trained on \(3 of float32, with other values\)"):
        check_fingerprint(then, now)
    with pytest.raises(ValueError, match=r"\(3 of float32 then, 4 of bfloat16 now\)"):
        check_fingerprint(then, fingerprint(frozen(torch.ones(4, dtype=torch.bfloat16))))


def test_every_new_argument_is_compared_unless_it_is_known_to_change_no_number(make_args):
    compared = shaping_arguments(make_args())
    assert {"learning_rate", "on_nonfinite", "ema_decay", "train_sampling_strategy", "greater_is_better"} <= set(
        compared
    )
    assert not {"output_dir", "hub_token", "logging_steps", "save_steps", "report_to", "do_train"} & set(compared)
