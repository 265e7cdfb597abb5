"""The bytes that an optimizer says it will need, against those that it has then."""

import pytest
import torch
from torch import nn

from tr_optim import (
    AdaLomo,
    AdamW8bit,
    APOLLOAdamW,
    FiraAdamW,
    GaLoreAdafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lomo,
    find_targets,
)
from tr_optim.engine.memory_estimate import state_bytes


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 32)
        self.wide, self.tall = nn.Linear(32, 96), nn.Linear(96, 32)
        self.experts = nn.Parameter(torch.randn(3, 32, 48) / 8)
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(32, 40)
        self.to(dtype)

    def forward(self, tokens):
        hidden = self.tall(torch.tanh(self.wide(self.embedding(tokens))))
        hidden = hidden + torch.tanh(hidden @ self.experts.sum(0)) @ self.experts.sum(0).mT
        return nn.functional.cross_entropy(self.head(self.frozen(hidden)).float().flatten(0, 1), tokens.flatten())


def tokens(seed):
    return torch.randint(40, (4, 8), generator=torch.Generator().manual_seed(seed))


def groups(model, **options):
    targets = find_targets(model, ["wide", "tall", "head"]).parameters
    taken = [*targets.values(), model.experts]
    ids = {id(parameter) for parameter in taken}
    return [{"params": taken, "rank": 8, **options}, {"params": [p for p in model.parameters() if id(p) not in ids]}]


def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held(optimizer):
    return nbytes(value for state in optimizer.state.values() for value in state.values())


def step(optimizer, model, number, micro_batches=1):
    if getattr(optimizer, "fused_in_backward", False):
        for micro_batch in range(micro_batches):
            optimizer.backward(model(tokens(number)), last=micro_batch == micro_batches - 1)
    else:
        model(tokens(number)).backward()
    optimizer.step()
    optimizer.zero_grad()


KINDS = {
    "galore": (GaLoreAdamW, {}),
    "galore svd": (GaLoreAdamW, {"method": "svd"}),
    "galore int8 basis, lazy": (GaLoreAdamW, {"basis_dtype": "int8", "refresh": "lazy"}),
    "galore adafactor": (GaLoreAdafactor, {"lr": 1e-3, "relative_step": False}),
    "galore adafactor with beta1": (GaLoreAdafactor, {"lr": 1e-3, "relative_step": False, "beta1": 0.9}),
    "galore 8 bits": (GaLoreAdamW8bit, {}),
    "apollo": (APOLLOAdamW, {}),
    "fira": (FiraAdamW, {}),
}


MODES = [(kind, mode) for kind in KINDS for mode in ("step", "deferred", "immediate")]
MODES = [made for made in MODES if made not in (("apollo", "deferred"), ("fira", "deferred"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_the_state_has_the_bytes_that_were_expected(kind, mode, dtype):
    made, options = KINDS[kind]
    model = Model(dtype)
    optimizer = made(groups(model, update_proj_gap=2), **{"lr": 1e-3, **options}, mode=mode)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    expected = optimizer.expected_bytes()[1]
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    for number in range(4):
        step(optimizer, model, number)
        assert held(optimizer) == optimizer.expected_bytes()[1] == expected


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_the_state_has_the_bytes_that_were_expected_whatever_the_side(proj_type):
    model = Model()
    optimizer = GaLoreAdamW(groups(model, proj_type=proj_type))
    expected = optimizer.expected_bytes()[1]
    step(optimizer, model, 0)
    assert held(optimizer) == expected


def test_the_bytes_of_a_plain_state_can_be_computed_too():
    model = Model()
    optimizer = AdamW8bit(model.parameters())
    expected = state_bytes(optimizer, AdamW8bit.step)
    step(optimizer, model, 0)
    assert held(optimizer) == expected


def in_flight(model, consumed):
    largest = sorted(consumed, key=lambda parameter: parameter.numel())[-2:]
    copied = 4 * largest[-1].numel() if largest[-1].dtype == torch.bfloat16 else 0
    return nbytes(largest) + copied


def kept(optimizer, model):
    window = optimizer._gathering.window
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return nbytes([*window.projected.values(), *window.whole.values(), *grads])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("refresh_from", ["all", "first"])
@pytest.mark.parametrize("mode", ["deferred", "immediate"])
def test_between_backward_passes_there_are_the_gradients_that_were_expected(mode, refresh_from, dtype):
    model = Model(dtype)
    divided = groups(model)
    optimizer = GaLoreAdamW(divided, mode=mode, refresh_from=refresh_from)
    consumed = divided[0]["params"] if mode == "deferred" else [p for p in model.parameters() if p.requires_grad]
    once, several = (optimizer.expected_bytes(number)[0] - in_flight(model, consumed) for number in (1, 2))
    optimizer.backward(model(tokens(0)), last=False)
    assert kept(optimizer, model) == several
    optimizer.backward(model(tokens(1)))
    assert kept(optimizer, model) == once
    if mode == "immediate":
        assert once == 0


def test_an_ordinary_step_has_all_gradients():
    model = Model(torch.bfloat16)
    optimizer = GaLoreAdamW(groups(model))
    assert optimizer.expected_bytes()[0] == nbytes(p for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_lomo_expects_the_two_largest_gradients(kind):
    model = Model()
    optimizer = kind([p for p in model.parameters() if p.requires_grad])
    gradients, state = optimizer.expected_bytes(1)
    assert gradients == in_flight(model, [p for p in model.parameters() if p.requires_grad])
    step(optimizer, model, 0)
    assert held(optimizer) == state


def test_expecting_leaves_no_trace_in_an_optimizer_that_is_in_the_middle_of_a_step():
    models, optimizers = zip(*((m, GaLoreAdamW(groups(m), mode="deferred")) for m in (Model(), Model())), strict=True)
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(3):
            optimizer.backward(model(tokens(number)), last=False)
            if model is models[0]:
                optimizer.expected_bytes(2)
            optimizer.backward(model(tokens(number + 7)))
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
