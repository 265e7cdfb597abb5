import pytest
import torch
from torch import nn

from tr_optim import Targets, find_targets


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.o_proj = nn.Linear(4, 4, bias=False)


class Conv1D(nn.Module):  # as transformers names it
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 12))
        self.bias = nn.Parameter(torch.zeros(12))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(3, 4, 8))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.old = Conv1D()
        self.experts = Experts()
        self.conv = nn.Conv1d(4, 4, 3)
        self.lm_head = nn.Linear(4, 10, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def found(names, model=None):
    return list(find_targets(Model() if model is None else model, names).parameters)


def test_a_name_inside_a_path_stands_for_every_module_that_has_it():
    assert found(["attn"]) == [f"layers.{n}.self_attn.{p}_proj" for n in range(12) for p in "qo"]
    assert found("mlp") == [f"layers.{n}.mlp.{i}" for n in range(12) for i in (0, 2)]


def test_a_number_is_taken_as_a_whole():
    assert {name.split(".")[1] for name in found("layers.1")} == {"1"}
    assert {name.split(".")[1] for name in found(["layers.1", "layers.11"])} == {"1", "11"}
    assert found("mlp.0") == [f"layers.{n}.mlp.0" for n in range(12)]


def test_an_exact_path_stands_for_that_module_and_what_is_in_it():
    assert found("layers.3.self_attn") == ["layers.3.self_attn.q_proj", "layers.3.self_attn.o_proj"]
    assert found("layers.3.self_attn.q_proj") == ["layers.3.self_attn.q_proj"]
    assert found("layers.3.self_attn.q_proj.weight") == ["layers.3.self_attn.q_proj"]


def test_a_regular_expression_matches_whole_paths():
    assert found([r".*.attn.*"]) == found(["attn"])
    assert found(r"layers\.[01]\.mlp\.\d") == [f"layers.{n}.mlp.{i}" for n in (0, 1) for i in (0, 2)]


@pytest.mark.parametrize("name", ["all-linear", "all_linear"])
def test_all_linear_stands_for_linear_layers_conv1d_and_stacks_of_experts(name):
    names = found(name)
    assert len(names) == 12 * 4 + 3
    assert {"old", "experts.gate_up", "lm_head"} <= set(names)
    assert "conv" not in names
    assert "embed" not in names


def test_a_tied_layer_is_found_by_its_own_name_and_once():
    model = Model()
    targets = find_targets(model, ["lm_head", "all-linear"])
    assert sum(parameter is model.embed.weight for parameter in targets.parameters.values()) == 1
    assert model.embed.weight in targets


def test_an_embedding_is_found_by_its_whole_path():
    assert found("embed", Model(tied=False)) == ["embed"]
    assert found("embed.weight", Model(tied=False)) == ["embed"]


def test_frozen_parameters_are_left_out():
    model = Model()
    model.layers[0].requires_grad_(False)
    assert not any(name.startswith("layers.0.") for name in found("mlp", model))


def test_what_is_found_is_described_with_its_share():
    text = find_targets(Model(), "mlp").describe()
    assert text.startswith("24 matrices with 768 of ")
    assert "layers.0.mlp.0" in text
    assert text.endswith("and 16 more")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("atn", r"'atn' stands for no matrix; .*layers"),
        (
            ["mlp", "nothing_like_it"],
            "'nothing_like_it' stands for no matrix; there are old, experts.gate_up|there are",
        ),
        ("norm", r"'norm' stands for no matrix: layers.0.norm.* \(LayerNorm\) has none of nn.Linear"),
        ("mbed", "an embedding is named by its whole path: embed"),
        ("[", r"'\[' stands for no matrix"),
        ([], "name at least one module, or 'all-linear'"),
        ("", "name at least one module"),
    ],
)
def test_names_that_stand_for_nothing_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        find_targets(Model(tied=False), names)


def test_names_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="give a string or a list of strings"):
        find_targets(Model(), {"mlp": 1})


def test_names_of_frozen_modules_are_refused():
    model = Model()
    model.layers.requires_grad_(False)
    with pytest.raises(ValueError, match="stands for frozen parameters only"):
        find_targets(model, "mlp")


def test_a_model_without_matrices_is_refused():
    with pytest.raises(ValueError, match="the model has no nn.Linear, no Conv1D and no stacked weights"):
        find_targets(nn.LayerNorm(3), "all-linear")


def test_what_is_broadcast_over_a_batch_is_no_stack():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
            self.positions = nn.Parameter(torch.zeros(1, 17, 8))
            self.experts = nn.Parameter(torch.zeros(2, 8, 8))
            self.head = nn.Linear(8, 4)

    assert sorted(find_targets(Vision(), "all-linear").parameters) == ["experts", "head"]
    with pytest.raises(ValueError, match="'positions' stands for no matrix"):
        find_targets(Vision(), "positions")


def test_membership_is_looked_up_and_not_searched_for():
    """With 18,000 layers a search for each parameter took minutes at the start of a run."""
    looked_at = []

    class Watched(dict):
        def values(self):
            looked_at.append(1)
            return super().values()

    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(300))
    found = find_targets(layers, [str(number) for number in range(300)])
    assert list(found.parameters) == [str(number) for number in range(300)]
    targets = Targets(Watched(found.parameters), found.all_elements)
    assert all(parameter in targets for parameter in layers.parameters())
    assert nn.Parameter(torch.zeros(1, 1)) not in targets
    assert len(looked_at) == 1
