import copy
import math
import pickle

import pytest
import torch
from torch import nn

from tr_optim import NEFTune, input_embedding

IDS = torch.arange(12).reshape(2, 6) % 10


def _embedding(width=32):
    return nn.Embedding(10, width)


def test_noise_is_uniform_within_its_bound():
    embedding, ids = _embedding(64), torch.zeros(8, 100, dtype=torch.long)
    clean = embedding(ids)
    with NEFTune(embedding, 5.0):
        noise = (embedding(ids) - clean).detach()
    bound = 5.0 / math.sqrt(100 * 64)
    assert noise.abs().max() <= bound + 2 * 2**-24 * clean.abs().max()  # added and taken away again, each rounded
    assert noise.abs().max() > 0.99 * bound
    assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert abs(noise.mean().item()) < 0.01 * bound
    assert noise.flatten(1).norm(dim=1).mean().item() == pytest.approx(5.0 / math.sqrt(3), rel=0.02)
    assert not torch.equal(noise[0], noise[1])


def test_there_is_no_noise_in_evaluation():
    embedding = _embedding().eval()
    with NEFTune(embedding, 5.0):
        assert torch.equal(embedding(IDS), nn.functional.embedding(IDS, embedding.weight))


def test_a_context_can_be_entered_again():
    embedding = _embedding()
    neftune = NEFTune(embedding, 5.0)
    for _ in range(2):
        with neftune:
            assert not torch.equal(embedding(IDS), nn.functional.embedding(IDS, embedding.weight))
    assert not embedding._forward_hooks


def test_noise_does_not_add_up():
    embedding = _embedding()
    with (
        NEFTune(embedding, 5.0),
        pytest.raises(RuntimeError, match="has NEFTune noise already"),
        NEFTune(embedding, 5.0),
    ):
        pass
    assert torch.equal(embedding(IDS), nn.functional.embedding(IDS, embedding.weight))
    with NEFTune(embedding, 5.0):
        assert len(embedding._forward_hooks) == 1
    assert not embedding._forward_hooks


def test_a_packed_batch_of_one_dimension_has_noise_by_its_own_length():
    embedding = _embedding(16)
    ids = torch.zeros(50, dtype=torch.long)
    with NEFTune(embedding, 1.0):
        noise = embedding(ids) - embedding.weight[0]
    assert noise.abs().max().item() == pytest.approx(1 / math.sqrt(50 * 16), rel=0.05)


def test_copies_made_within_have_no_noise():
    embedding = _embedding()
    with NEFTune(embedding, 5.0):
        copies = copy.deepcopy(embedding), pickle.loads(pickle.dumps(embedding))
        for twin in copies:
            assert torch.equal(twin(IDS), nn.functional.embedding(IDS, twin.weight))
        with NEFTune(copies[0], 5.0):
            assert not torch.equal(copies[0](IDS), nn.functional.embedding(IDS, copies[0].weight))


def test_gradients_reach_the_embedding_unchanged():
    embedding = _embedding()
    with NEFTune(embedding, 5.0):
        embedding(IDS).sum().backward()
    counts = torch.bincount(IDS.flatten(), minlength=10).float()
    torch.testing.assert_close(embedding.weight.grad, counts[:, None].expand(10, 32))


def test_padded_noise_of_the_default_generator_is_that_of_transformers():
    module = pytest.importorskip("transformers.integrations.neftune")
    ours, theirs = _embedding(), _embedding()
    theirs.load_state_dict(ours.state_dict())
    theirs.neftune_noise_alpha = 5.0
    theirs.register_forward_hook(module.neftune_post_forward_hook)
    with NEFTune(ours, 5.0, length="padded", seed=None):
        torch.manual_seed(1)
        found = ours(IDS)
    torch.manual_seed(1)
    torch.testing.assert_close(found, theirs(IDS), rtol=0, atol=1e-6)


class Told(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.positions, self.words = nn.Embedding(4, 2), nn.Embedding(4, 2)
        self._told = embedding

    def get_input_embeddings(self):
        if self._told is None:
            raise NotImplementedError
        return getattr(self, self._told)


def test_the_input_embedding_is_found():
    alone = _embedding()
    assert input_embedding(alone) is alone
    only = nn.Sequential(_embedding(), nn.Linear(32, 2))
    assert input_embedding(only) is only[0]
    told = Told("words")
    assert input_embedding(told) is told.words
    assert NEFTune(told, 1.0).embedding is told.words


def test_an_input_embedding_that_is_not_found_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no nn.Embedding and no get_input_embeddings\(\)"):
        input_embedding(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Told has 2 embeddings \(positions, words\).*instance model.positions"):
        input_embedding(Told(None))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_a_size_that_is_no_size_is_refused(alpha):
    with pytest.raises(ValueError, match="must be positive and finite"):
        NEFTune(_embedding(), alpha)


def test_a_length_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="length='long' is not known; it is one of real, padded"):
        NEFTune(_embedding(), 5.0, length="long")
