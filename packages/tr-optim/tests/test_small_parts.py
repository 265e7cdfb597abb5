"""Parts of optimizers whose faults a whole run hardly shows."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tr_optim import AdamW8bit, GaLoreAdamW
from tr_optim.engine.backward_norms import clip_coefficient, norm_of, total_norm
from tr_optim.engine.gradient_window import Mixing
from tr_optim.engine.hooks import is_reentrant, repeated_parameters
from tr_optim.projection.refresh import LazyRefresh


def matrix():
    return nn.Parameter(torch.ones(4, 6))


def test_places_count_all_parameters_and_the_turns_of_those_projected():
    groups = [
        {"params": [matrix(), matrix()], "rank": 2},
        {"params": [matrix(), nn.Parameter(torch.ones(3))]},
        {"params": [matrix()], "rank": 2},
    ]
    places = [place for _, place in GaLoreAdamW(groups, lr=1e-2).numbered()]
    assert [place.index for place in places] == [0, 1, 2, 3, 4]
    assert [place.turn for place in places if place.is_projected] == [0, 1, 2]
    assert {place.count for place in places} == {3}


def test_norms_of_parts_make_the_norm_of_all_and_nothing_has_none():
    parts = [torch.tensor([3.0]), torch.tensor([4.0, 12.0])]
    assert total_norm(map(norm_of, parts), torch.device("cpu")).item() == 13.0
    assert total_norm([], torch.device("cpu")).item() == 0.0
    assert norm_of(torch.full((4,), 60000.0, dtype=torch.float16)).item() == 120000.0
    assert clip_coefficient(torch.tensor(4.0), 1.0).item() == pytest.approx(1 / 4.000001, rel=1e-7)
    assert clip_coefficient(torch.tensor(1e-6), 1e-7).item() == pytest.approx(0.05, rel=1e-6)
    assert clip_coefficient(torch.tensor(0.5), 1.0).item() == 1.0


def test_parameters_are_repeated_only_where_several_segments_use_them():
    torch.manual_seed(0)
    once, twice, outside = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    hidden = torch.ones(2, 3, requires_grad=True)
    for layer in (once, twice, twice):
        hidden = checkpoint(layer, hidden, use_reentrant=True)
    loss = outside(hidden).sum()
    assert is_reentrant(loss)
    parameters = [p for layer in (once, twice, outside) for p in layer.parameters()]
    repeated = repeated_parameters(loss, parameters)
    assert {id(p) for p in repeated} == {id(p) for p in twice.parameters()}
    assert all(p.grad is None for p in parameters)


def test_a_sketch_depends_on_its_key_alone():
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        mixing = Mixing(torch.zeros(5, 6), 3, (5, 6), ("key",), None)
        found.append([mixing.left, mixing.right, mixing.signs])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert set(found[0][2].flatten().tolist()) == {-1.0, 1.0}
    assert not torch.equal(Mixing(torch.zeros(5, 6), 3, (5, 6), ("other",), None).signs, found[0][2])


class Turn:
    def cosine(self):
        return torch.tensor(0.9)


def test_a_matrix_whose_schedule_becomes_lazy_in_the_middle_waits_until_its_window_is_full():
    lazy, parameter = LazyRefresh(0.4, 3), torch.zeros(4, 4)
    state, found = {"step": torch.zeros(())}, []
    for step in range(1, 60):
        state["step"] = torch.tensor(float(step))
        if lazy.is_due(parameter, state, 4, 0):
            found.append(step)
            lazy.note(parameter, state, Turn(), 0)
    # Three cosines before the gap doubles for the first time, as where it was lazy from the beginning.
    assert found[:5] == [4, 8, 12, 20, 36]


def test_a_loaded_state_may_lack_parameters_that_had_no_gradient():
    used, unused = nn.Parameter(torch.ones(4, 2000)), nn.Parameter(torch.ones(4, 2000))
    theirs = torch.optim.AdamW([unused, used], lr=1e-2)
    used.grad = torch.ones_like(used)
    theirs.step()
    ours = AdamW8bit([unused, used], lr=1e-2)
    ours.load_state_dict(theirs.state_dict())
    assert not ours.state.get(unused)
    assert ours.state[used]["exp_avg"].dtype == torch.int8
    unused.grad = torch.ones_like(unused)
    ours.step()
    assert ours.state[unused]["exp_avg"].dtype == torch.int8
