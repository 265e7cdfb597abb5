import types

import torch
from torch import nn

from tr_optim.neftune_callback import NEFTuneCallback

IDS = torch.tensor([[1, 2, 3]])


def _noisy(embedding):
    return not torch.equal(embedding(IDS), nn.functional.embedding(IDS, embedding.weight))


def test_noise_lasts_from_the_beginning_of_training_to_its_end():
    callback = NEFTuneCallback.from_arguments(types.SimpleNamespace(neftune_noise_alpha=5.0))
    model = nn.Sequential(nn.Embedding(4, 8))
    for _ in range(2):
        callback.on_train_begin(None, None, None, model=model)
        assert _noisy(model[0])
        callback.on_train_end(None, None, None, model=model)
        assert not _noisy(model[0])
    callback.on_train_end(None, None, None)
    assert not model[0]._forward_hooks
