"""torch's Muon and AdamW as one optimizer: their numbers, which matrices, and what is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_optim.adapters import registry
from tr_optim.adapters.torch_muon import MuonAdamW, hidden_matrices

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9")


class Network(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.second(self.norm(self.first(self.embedding(tokens)))))

    def get_output_embeddings(self):
        return self.head


def arguments(**changes):
    given = {"optim": "muon", "optim_args": None, "optim_target_modules": None, "learning_rate": 1e-2}
    adam = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    return SimpleNamespace(**{**given, **adam, **changes})


def built(model, **changes):
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return registry.muon(groups, arguments(**changes), model)


def train(model, optimizers, first=0, last=6):
    for step in range(first, last):
        tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_weights_are_those_of_the_two_optimizers_of_torch_bit_for_bit():
    ours, theirs = Network(), Network()
    train(ours, [built(ours, optim_args="momentum=0.9, ns_steps=4")])
    hidden = [theirs.first.weight, theirs.second.weight]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, momentum=0.9, ns_steps=4, adjust_lr_fn="match_rms_adamw")
    others = [theirs.embedding.weight, theirs.head.weight]
    rest = [p for p in theirs.parameters() if p.dim() == 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    train(theirs, [muon, torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6)])
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name


def test_a_loaded_state_and_a_copy_go_on_bit_for_bit():
    whole = Network()
    train(whole, [built(whole)])
    first = Network()
    optimizer = built(first)
    train(first, [optimizer], last=3)
    second, copied = copy.deepcopy((first, optimizer))
    resumed = copy.deepcopy(first)
    loaded = built(resumed)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(second, [copied], 3)
    train(resumed, [loaded], 3)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_hidden_matrices_are_linear_layers_without_the_output_layer_or_those_named():
    model = Network()
    assert set(hidden_matrices(model, None).parameters) == {"first", "second"}
    assert set(hidden_matrices(Network(tied=True), None).parameters) == {"first", "second"}
    assert set(hidden_matrices(model, ["second", "head"]).parameters) == {"second", "head"}
    only_tied = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3, bias=False))
    only_tied[1].weight = only_tied[0].weight
    with pytest.raises(ValueError, match=r"none beside its output layer; use optim='adamw_torch'"):
        hidden_matrices(only_tied, None)


def test_a_schedule_and_a_hook_see_each_step_once():
    model = Network()
    optimizer, seen = built(model), []
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = model.first.weight.detach().clone()
    for step in range(3):
        train(model, [optimizer], step, step + 1)
        schedule.step()
    assert seen == [1e-2, 5e-3, 2.5e-3]
    assert not torch.equal(before, model.first.weight)


def test_what_cannot_be_is_refused(monkeypatch):
    vector = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"shape \(4,\) is not a matrix; Muon updates matrices only"):
        MuonAdamW([{"params": [vector], "projects": True}])
    with pytest.raises(ValueError, match="muon does not take 'momentun'.*did you mean momentum"):
        built(Network(), optim_args="momentun=0.9")
    with pytest.raises(ValueError, match="not supported"):
        built(Network(), optim_args="adjust_lr_fn=none")
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ImportError, match=r"which torch .* lacks; pip install 'torch>=2.9'"):
        built(Network())


def test_bytes_are_known_before_the_first_step():
    model = Network()
    optimizer = built(model)
    expected = optimizer.expected_bytes()[1]
    train(model, [optimizer], last=1)
    held = sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())
    assert held == expected
