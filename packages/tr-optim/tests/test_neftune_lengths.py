"""NEFTune's noise by the real length of a row, and of each sequence in a packed one."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from tr_optim import NEFTune
from tr_optim.neftune_noise import real_lengths

WIDTH, ALPHA = 64, 5.0
LENGTHS = [256, 128, 64, 16]
MASK = (torch.arange(256) < torch.tensor(LENGTHS)[:, None]).long()


class Model(nn.Module):
    """An embedding whose output is looked at, a level below what is called."""

    def __init__(self, model=None):
        super().__init__()
        self.words = nn.Embedding(10, WIDTH) if model is None else model

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return self.words(input_ids)


class Wrapper(nn.Module):
    """Hands on what it gets, as wrappers do."""

    def __init__(self, model):
        super().__init__()
        self.base = model

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


def noise(model, *args, alpha=ALPHA, **kwargs):
    """Return the noise of one call; the ids are zeros of the mask's or the positions' shape unless they are given."""
    like = next((value for value in kwargs.values() if value is not None), MASK)
    args = args or (torch.zeros(like.shape[-2:], dtype=torch.long),)
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    with NEFTune(model, alpha):
        return (model(*args, **kwargs) - embedding.weight[args[0]]).detach()


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_noise_of_a_row_has_the_norm_of_its_own_length_and_padding_has_none(left, dtype):
    mask = (MASK.flip(1) if left else MASK).to(dtype)
    found = noise(Model(), attention_mask=mask)
    assert found[mask <= 0].abs().max() == 0
    norms = found.flatten(1).norm(dim=1)
    assert norms.tolist() == pytest.approx([ALPHA / math.sqrt(3)] * 4, rel=0.05)
    largest = found.abs().flatten(1).amax(dim=1).tolist()
    assert largest == pytest.approx([ALPHA / math.sqrt(length * WIDTH) for length in LENGTHS], rel=0.01)


def test_the_mean_norm_is_that_of_the_paper_within_two_percent():
    mask = MASK.repeat(32, 1)
    norms = noise(Model(), attention_mask=mask).flatten(1).norm(dim=1).view(32, 4)
    assert norms.mean(dim=0).tolist() == pytest.approx([ALPHA / math.sqrt(3)] * 4, rel=0.02)


def test_padded_noise_gives_short_rows_less_and_padding_some():
    model = Model()
    with NEFTune(model, ALPHA, length="padded"):
        found = model(torch.zeros_like(MASK), attention_mask=MASK) - model.words.weight[0]
    norms = (found * MASK[..., None]).flatten(1).norm(dim=1).tolist()
    expected = [ALPHA / math.sqrt(3) * math.sqrt(length / 256) for length in LENGTHS]
    assert norms == pytest.approx(expected, rel=0.05)
    assert found[MASK == 0].abs().max() > 0


@pytest.mark.parametrize("call", ["by name", "by place", "in a wrapper"])
def test_a_mask_is_found_however_it_is_given(call):
    model = Wrapper(Model()) if call == "in a wrapper" else Model()
    ids = torch.zeros_like(MASK)
    found = noise(model, ids, MASK) if call == "by place" else noise(model, ids, attention_mask=MASK)
    assert found[MASK == 0].abs().max() == 0


@pytest.mark.parametrize("told", [None, torch.ones(4, 1, 256, 256)], ids=["none", "of pairs"])
def test_without_a_mask_of_the_tokens_a_row_is_as_long_as_it_looks(told):
    found = noise(Model(), torch.zeros_like(MASK), attention_mask=told)
    assert found.abs().amax().item() == pytest.approx(ALPHA / math.sqrt(256 * WIDTH), rel=0.01)
    assert (found.abs().amax(dim=-1) > 0).all()


@pytest.mark.parametrize("first", [0, 2])
def test_each_sequence_of_a_packed_row_has_its_own_length(first):
    lengths = [5, 1, 10, 16]
    positions = torch.cat([torch.arange(length) + first for length in lengths])
    for ids in (torch.zeros(1, 32, dtype=torch.long), torch.zeros(32, dtype=torch.long)):
        found = noise(Model(), ids, position_ids=positions.view_as(ids), alpha=1.0)
        largest = [part.abs().max().item() for part in found.view(32, WIDTH).split(lengths)]
        assert largest == pytest.approx([1 / math.sqrt(length * WIDTH) for length in lengths], rel=0.06)
    # One row without the dimension of the batch, and positions with it.
    torch.testing.assert_close(noise(Model(), ids, position_ids=positions[None], alpha=1.0), found, rtol=0, atol=1e-6)


def test_lengths_count_real_tokens_of_each_sequence():
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5]])
    expected = [[2, 2, 3, 3, 3, 0], [0, 3, 3, 3, 2, 2], [3, 3, 3, 0, 0, 0]]
    assert real_lengths(mask, positions).tolist() == expected
    assert real_lengths(mask, None).tolist() == [[5, 5, 5, 5, 5, 0], [0, 5, 5, 5, 5, 5], [3, 3, 3, 0, 0, 0]]
    assert real_lengths(None, positions)[2].tolist() == [6] * 6


def test_a_row_that_is_all_padding_has_no_noise():
    assert noise(Model(), attention_mask=torch.zeros(2, 4)).abs().max() == 0


class Reader(nn.Module):
    """One side of a model that reads and writes with one embedding."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def forward(self, input_ids, attention_mask=None):
        return self.words(input_ids)


class TwoSides(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(10, WIDTH)
        self.encoder, self.decoder = Reader(self.shared), Reader(self.shared)

    def get_input_embeddings(self):
        return self.shared

    def forward(self, input_ids, attention_mask=None, decoder_attention_mask=None):
        return self.encoder(input_ids, attention_mask), self.decoder(input_ids, decoder_attention_mask)


def test_each_side_of_a_model_goes_by_its_own_mask():
    model, ids = TwoSides(), torch.zeros(2, 8, dtype=torch.long)
    mask = torch.tensor([[1] * 8, [1] * 4 + [0] * 4])
    with NEFTune(model, ALPHA):
        first, second = (side - model.shared.weight[0] for side in model(ids, mask))
        third = model.shared(ids) - model.shared.weight[0]
    assert first[1, 4:].abs().max() == 0
    assert second[1, 4:].abs().max() > 0
    assert third[1, 4:].abs().max() > 0  # the model is not called, and what it was called with before is forgotten
    assert not torch.equal(first[0], second[0])


def test_no_hook_is_left_anywhere_after_an_exception_and_copies_have_none():
    model = Wrapper(Model())

    def failing():
        with NEFTune(model, ALPHA):
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                embedding = twin.base.words
                assert torch.equal(twin(MASK, attention_mask=MASK), embedding.weight[MASK])
            model(MASK, attention_mask=None, nonsense=1)

    with pytest.raises(TypeError, match="nonsense"):
        failing()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert torch.equal(model(MASK, attention_mask=MASK), model.base.words.weight[MASK])
