"""Which modules are shared out by experts, and what is refused before any is."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_dist.mesh.experts import Experts, Tokens, experts_of, share_out


class Stacked(nn.Module):
    def __init__(self, *shapes):
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"weights_{number}", nn.Parameter(torch.zeros(shape)))


def network(**plan):
    layers = nn.ModuleList(nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": Stacked((4, 3))}) for _ in range(2))
    model = nn.ModuleDict({"layers": layers})
    vars(model).update(plan)
    return model


def test_a_plan_of_a_model_names_experts_and_their_weights():
    plan = {"layers.*.experts.weights": "grouped_gemm", "layers.*.experts": "ep_dispatch_experts"}
    assert [*experts_of(network(_ep_plan=plan), None)] == ["layers.0.experts", "layers.1.experts"]
    assert [*experts_of(network(), {"layers.1.experts": "experts"})] == ["layers.1.experts"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (None, "ModuleDict has no experts that one names; leave ep_size out, or name the modules as ep_plan, such as"),
        ({"layers.*.over": "experts"}, r"no module is called 'layers.\*.over'; there are layers, layers.0"),
        ({"layers.*.experts": "colwise"}, r"'layers.\*.experts' has 'colwise', which is not done here; the style is"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(plan, said):
    with pytest.raises(ValueError, match=said):
        experts_of(network(), plan)


def mesh(size):
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: 0, device_type="cpu")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Stacked((4, 3), (3, 4)), r"not all stacked by them in dimension 0: weights_0 \(4, 3\), weights_1 \(3, 4\)"),
        (Stacked(), "it has none"),
        (nn.Sequential(nn.Linear(2, 2)), "not all stacked by them"),
        (Stacked((6, 3), (6,)), "ep_size=4 does not divide the 6 experts of layer; 2, 3, 6 do"),
    ],
)
def test_a_module_that_cannot_be_shared_out_is_refused(module, said):
    tokens = Tokens([])
    tokens.brought = 4
    with pytest.raises(ValueError, match=said):
        share_out("layer", module, mesh(4), tokens)


@pytest.mark.parametrize(
    ("size", "shape", "said"),
    [
        (3, (1, 2, 4, 1, 1), r"ep_size=3 does not divide the 8 processes .* \(2 replicas x 4 shards\); 2, 4, 8 would"),
        (2, (1, 1, 1, 1, 1), "does not divide the 1 processes .* no size above 1 would"),
        (2, (1, 1, 3, 1, 2), "does not divide the 3 processes .* 3 would"),
    ],
)
def test_a_size_that_fits_no_processes_is_refused_with_those_that_do(size, shape, said):
    with pytest.raises(ValueError, match=said):
        Experts(size).join(torch.zeros(shape), torch.device("cpu"), lambda groups: None)
