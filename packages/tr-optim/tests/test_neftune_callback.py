import types

import torch
from torch import nn

from tr_optim.neftune import NEFTuneCallback

IDS = torch.tensor([[1, 2, 3]])


def arguments(rank=0, **options):
    options = {"neftune_noise_alpha": 5.0, "neftune_length": "real", "seed": 3, **options}
    return types.SimpleNamespace(process_index=rank, **options)


def noise(embedding):
    return (embedding(IDS) - nn.functional.embedding(IDS, embedding.weight)).detach()


def test_noise_lasts_from_the_beginning_of_training_to_its_end():
    callback = NEFTuneCallback.from_arguments(arguments())
    model = nn.Sequential(nn.Embedding(4, 8))
    for _ in range(2):
        callback.on_train_begin(arguments(), None, None, model=model)
        assert noise(model[0]).abs().max() > 0
        callback.on_train_end(None, None, None, model=model)
        assert noise(model[0]).abs().max() == 0
    callback.on_train_end(None, None, None)
    assert not model[0]._forward_hooks


def test_noise_is_that_of_the_step_and_the_rank():
    def steps(first, last, rank=0, **options):
        callback = NEFTuneCallback.from_arguments(arguments(rank, **options))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 8))
        callback.on_train_begin(arguments(rank), None, None, model=model)
        made = []
        for step in range(first, last):
            callback.on_step_begin(None, types.SimpleNamespace(global_step=step), None)
            made += [noise(model[0]), noise(model[0])]
        callback.on_train_end(None, None, None)
        return torch.stack(made)

    whole = steps(0, 4)
    assert torch.equal(whole[4:], steps(2, 4))
    assert len({round(part.sum().item(), 6) for part in whole}) == 8
    assert not torch.equal(whole, steps(0, 4, rank=1))
    assert not torch.equal(whole, steps(0, 4, seed=4))
    assert torch.equal(whole, steps(0, 4, neftune_length="padded"))  # of one row, without padding
