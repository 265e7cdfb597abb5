"""A model and its optimizer under names, which no order of parameters and no wrapper changes."""

import copy

import pytest
import torch
from ckpt_parts import same
from ckpt_shards import Net, build, optimizer_of, train, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tr_ckpt import Checkpointer, CheckpointError
from tr_ckpt.sharded import ModelState, OptimizerState, named_state, stateful


def trained(steps=3):
    model, optimizer = build(1)
    train(model, optimizer, range(steps))
    return model, optimizer


def test_names_are_those_of_torch():
    model, optimizer = trained()
    assert same(OptimizerState(model, optimizer).state_dict(), get_optimizer_state_dict(model, optimizer))


def test_saving_before_the_first_step_changes_nothing(tmp_path):
    model, optimizer = build(1)
    Checkpointer(tmp_path).save(0, stateful(model, optimizer))
    assert not optimizer.state
    assert train(model, optimizer, range(3)) == train(*build(1), range(3))

    restored = build(2)
    assert Checkpointer(tmp_path).restore(stateful(*restored)) == 0
    assert train(*restored, range(3)) == train(*build(1), range(3))


def test_the_order_of_parameters_and_of_groups_does_not_matter(tmp_path):
    model, optimizer = trained()
    Checkpointer(tmp_path).save(3, stateful(model, optimizer))
    losses = train(model, optimizer, range(3, 6))

    other, _ = build(2)
    groups = [{"params": group["params"][::-1]} for group in optimizer_of(other).param_groups[::-1]]
    reordered = torch.optim.AdamW(groups, lr=9.0)
    assert Checkpointer(tmp_path).restore(stateful(other, reordered)) == 3
    assert [group["weight_decay"] for group in reordered.param_groups] == [0.1, 0.0]
    assert train(other, reordered, range(3, 6)) == losses


def test_names_given_to_the_optimizer_stay_in_its_own_order():
    def named(model, order):
        return torch.optim.AdamW(list(model.named_parameters())[::order], lr=0.1)

    model, other = Net(), Net()
    first, second = named(model, 1), named(other, -1)
    OptimizerState(other, second).load_state_dict(OptimizerState(model, first).state_dict())
    [group] = second.param_groups
    assert group["param_names"] == [name for name, _ in other.named_parameters()][::-1]
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in other.parameters()][::-1]


class Wrapped(nn.Module):
    """What `torch.compile` and activation checkpointing make of a module's names."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner

    def forward(self, x):
        return self._orig_mod(x)


def wrapped(seed):
    model, _ = build(seed)
    model.second = Wrapped(model.second)
    model = Wrapped(model)
    return model, optimizer_of(model)


@pytest.mark.parametrize(("make", "into"), [(build, wrapped), (wrapped, build), (wrapped, wrapped)])
def test_wrappers_leave_no_trace_in_names(tmp_path, make, into):
    model, optimizer = make(1)
    train(model, optimizer, range(3))
    Checkpointer(tmp_path).save(3, stateful(model, optimizer))
    assert list(ModelState(model).state_dict()) == list(Net().state_dict())
    assert "second.weight" in OptimizerState(model, optimizer).state_dict()["state"]
    losses = train(model, optimizer, range(3, 6))
    other = into(2)
    Checkpointer(tmp_path).restore(stateful(*other))
    assert train(*other, range(3, 6)) == losses


def test_versions_of_modules_are_kept_through_wrappers():
    class Versioned(nn.Linear):
        _version = 7
        seen = None

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
            Versioned.seen = local_metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)

    state = ModelState(nn.Sequential(Wrapped(Versioned(2, 2)))).state_dict()
    assert state._metadata["0"] == {"version": 7}
    ModelState(nn.Sequential(Versioned(2, 2))).load_state_dict(state)
    assert Versioned.seen == 7
    Versioned.seen = None
    ModelState(nn.Sequential(Wrapped(Versioned(2, 2)))).load_state_dict(state)
    assert Versioned.seen == 7


def test_a_plain_optimizer_s_state_is_taken_over_by_number(tmp_path):
    model, optimizer = trained()
    Checkpointer(tmp_path).save(3, {"model": model, "optimizer": optimizer})
    losses = train(model, optimizer, range(3, 6))
    other = build(2)
    Checkpointer(tmp_path).restore(stateful(*other))
    assert train(*other, range(3, 6)) == losses


def test_tied_parameters_have_one_name(tmp_path):
    def tied(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = tied(1)
    train(model, optimizer, range(3))
    state = OptimizerState(model, optimizer).state_dict()
    assert list(state["state"]) == ["0.weight", "0.bias", "2.bias"]
    Checkpointer(tmp_path).save(3, stateful(model, optimizer))
    other = tied(2)
    Checkpointer(tmp_path).restore(stateful(*other))
    assert train(*other, range(3, 5)) == train(model, optimizer, range(3, 5))


def test_a_parameter_of_another_model_is_refused():
    model, _ = build(1)
    message = r"parameter 0 of group 0 of the optimizer, of shape \[5\], is not one of the model's; build the optimizer"
    with pytest.raises(CheckpointError, match=message):
        OptimizerState(model, optimizer_of(copy.deepcopy(model)))


def test_state_of_other_parameters_is_refused_by_name():
    model, optimizer = trained()
    other = nn.Sequential(nn.Linear(4, 5))
    with pytest.raises(
        CheckpointError, match=r"of other parameters: it lacks 0.bias, 0.weight; it holds first.bias, .* and"
    ):
        OptimizerState(other, torch.optim.AdamW(other.parameters())).load_state_dict(
            OptimizerState(model, optimizer).state_dict()
        )


def test_a_group_without_parameters_has_the_options_of_the_group_in_its_place():
    saved = [
        {"params": ["a"], "lr": 1.0},
        {"params": [], "lr": 2.0},
        {"params": ["b"], "lr": 3.0, "param_names": ["b"]},
    ]
    assert named_state._options(1, [], saved) == {"lr": 2.0}
    assert named_state._options(2, [], saved) == {"lr": 3.0}
    assert named_state._options(0, ["b"], saved) == {"lr": 3.0}
    with pytest.raises(CheckpointError, match="the parameters of group 3 were saved in groups of different options"):
        named_state._options(3, [], saved)


def test_parameters_that_had_other_options_do_not_share_a_group():
    model, optimizer = trained()
    state = OptimizerState(model, optimizer).state_dict()
    one_group = torch.optim.AdamW(model.parameters())
    before = whole(one_group.state_dict())
    with pytest.raises(CheckpointError, match="group 0 were saved in groups of different options; build the optimizer"):
        OptimizerState(model, one_group).load_state_dict(state)
    assert same(whole(one_group.state_dict()), before)
