"""Weight decay is by one rule in tr-core and in tr-optim, which depend on each other in neither direction."""

import pytest
from torch import nn

import tr_optim
from tr_core import Trainer, TrainingArguments


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.layernorm_before = nn.MultiheadAttention(4, 2), nn.RMSNorm(4)
        self.q_norm, self.norm, self.normal = nn.RMSNorm(4), nn.RMSNorm(4), nn.Linear(4, 4)
        self.scaling = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.RMSNorm = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.layers[1].normal.requires_grad_(False)


@pytest.mark.parametrize("build", [Network, Layer, lambda: nn.LayerNorm(4), lambda: nn.Linear(2, 2, bias=False)])
def test_both_packages_decay_the_same_parameters_in_the_same_groups(tmp_path, build):
    model = build()
    args = TrainingArguments(str(tmp_path), use_cpu=True, weight_decay=0.1, optim="sgd", report_to="none")
    trainer = Trainer(model, args)
    assert trainer.get_decay_parameter_names(model) == tr_optim.decay_parameter_names(model)
    own = [(group["params"], group["weight_decay"]) for group in trainer.create_optimizer().param_groups]
    others = [(group["params"], group["weight_decay"]) for group in tr_optim.parameter_groups(model, 0.1)]
    assert [decay for _, decay in own] == [decay for _, decay in others]
    for (mine, _), (theirs, _) in zip(own, others, strict=True):
        assert list(map(id, mine)) == list(map(id, theirs))
