"""Where a model is cut into stages, and what is refused before anything is."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_dist.mesh.stages import Stages, cut_of


class Chain(nn.Module):
    """Four layers between words and a head."""

    def __init__(self, number=4):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(number))
        self.pp_plan = {
            "words": (["input_ids"], ["inputs_embeds"]),
            "layers": (["inputs_embeds"], ["hidden"]),
            "head": (["hidden"], ["logits"]),
        }

    def forward(self, input_ids=None, inputs_embeds=None):
        hidden = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Gate(nn.Module):
    def forward(self, hidden, gate):
        return hidden * gate


class Gated(Chain):
    """Takes an input that its plan does not name, for its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Gate() for _ in range(4))

    def forward(self, input_ids=None, inputs_embeds=None, gate=None):
        hidden = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden, gate)
        return self.head(hidden)


class GatedOutside(Chain):
    def forward(self, input_ids=None, inputs_embeds=None, gate=None):
        hidden = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden) if gate is None else layer(hidden) * gate
        return self.head(hidden)


class Scaled(Chain):
    def forward(self, input_ids=None, inputs_embeds=None):
        hidden = (self.words(input_ids) if inputs_embeds is None else inputs_embeds) * 2
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def without(model, attribute):
    del model.__dict__[attribute]
    return model


def with_parameter(model):
    model.scale = nn.Parameter(torch.ones(1))
    return model


class Wrapper(nn.Module):
    """Has the plan of what it wraps, as adapters of PEFT do."""

    base_model_prefix = "model"

    def __init__(self):
        super().__init__()
        self.base_model = Chain()
        self.config = SimpleNamespace(base_model_pp_plan=self.base_model.pp_plan)


@pytest.mark.parametrize(
    ("each", "split"), [(1, None), (2, None), (1, ["layers.1"]), (2, ["layers.1", "layers.2", "layers.3"])]
)
def test_stages_in_turn_are_the_whole_model(each, split):
    words, places = torch.arange(6).reshape(2, 3), [Stages(Chain(), split, place, 2, each) for place in range(2)]
    hidden = None
    for stage in range(2 * each):
        hidden = places[stage % 2].run(stage, {"input_ids": words}, hidden)
    assert torch.equal(hidden, Chain()(words))
    names = [{name for name, _ in place.model.named_parameters()} for place in places]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {name for name, _ in Chain().named_parameters()}


def test_every_stage_gets_the_inputs_that_the_plan_gives_to_none():
    inputs = {"input_ids": torch.arange(6).reshape(2, 3), "gate": torch.tensor(3.0)}
    first, second = (Stages(Gated(), None, place, 2, 1) for place in range(2))
    assert torch.equal(second.run(1, inputs, first.run(0, inputs, None)), Gated()(**inputs))


def test_what_happens_between_layers_with_an_input_is_refused():
    stages, hidden = Stages(GatedOutside(), None, 1, 2, 1), torch.randn(2, 3, 4)
    stages.check({"input_ids": None}, hidden)
    with pytest.raises(ValueError, match="unchanged from layer to layer, with the inputs input_ids, gate; its forward"):
        stages.check({"input_ids": None, "gate": torch.tensor(3.0)}, hidden)


def test_a_stage_is_not_a_model():
    model, drawn = Chain(), torch.get_rng_state()
    stages = Stages(model, None, 0, 2, 1)
    assert torch.equal(torch.get_rng_state(), drawn)  # or a shuffling loader had another order than on one process
    with pytest.raises(RuntimeError, match="holds some layers of Chain alone"):
        stages.model(torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("model", "split", "size", "said"),
    [
        (
            without(Chain(), "pp_plan"),
            None,
            2,
            "cuts a model by a plan, and Chain has none; give it an attribute such as",
        ),
        (Chain(3), None, 4, "pp_size=4 makes 4 stages of 3 layers; at most 3 processes have some"),
        (Chain(), ["layers.9"], 2, r"pp_split names layers.9; a stage begins with one of layers.0, layers.1"),
        (Chain(), ["layers.2", "layers.1"], 3, "must name other layers than the first, in their order"),
        (Chain(), ["layers.1"], 4, "begins 1 stages after the first, and pp_size=4 with 1 on each process needs 3"),
        (Scaled(), None, 2, "does not hand inputs_embeds unchanged from layer to layer"),
        (Wrapper(), None, 2, "as it is, and Wrapper wraps one, as for an adapter"),
        (with_parameter(Chain()), None, 2, "scale belongs to none of the modules of the plan, so to no stage"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model, split, size, said):
    with pytest.raises(ValueError, match=said):
        Stages(model, split, 0, size, 1)


def test_a_plan_says_what_each_stage_gets():
    cut = cut_of(Chain())
    assert (cut.before, cut.after, cut.first) == (["words"], ["head"], {"input_ids"})
