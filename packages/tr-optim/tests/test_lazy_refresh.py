import pytest
import torch
from galore_runs import data, groups, net, run, train, weights

from tr_optim import GaLoreAdamW
from tr_optim.engine.bases import Bases
from tr_optim.engine.settings import REFRESH_COSINE, Place, Projection
from tr_optim.projection.basis import Basis, orthonormalise
from tr_optim.projection.refresh import LazyRefresh, Rotation, is_due

GAP = 4


class Turn:
    """A change of a basis whose cosine is given."""

    def __init__(self, cosine):
        self._cosine = torch.tensor(cosine)

    def cosine(self):
        return self._cosine


def refreshes(cosines, steps=200, window=3, cosine=0.4, phase=0):
    """Return the steps in which a matrix gets a basis, given how much each differs from the one before."""
    lazy, state, parameter = LazyRefresh(cosine, window), {"step": torch.zeros(())}, torch.zeros(4, 4)
    cosines, found = iter(cosines), [0]
    lazy.note(parameter, state, None, phase)
    for step in range(1, steps):
        state["step"] = torch.tensor(float(step))
        if lazy.is_due(parameter, state, GAP, phase):
            assert lazy.is_due(parameter, state, GAP, phase)  # asking changes nothing
            found.append(step)
            lazy.note(parameter, state, Turn(next(cosines)), phase)
    return found


def test_the_gap_doubles_once_the_last_bases_were_alike_on_the_average():
    # The fourth refresh is the first with three cosines before it, the one that follows a doubled gap.
    assert refreshes([0.5] * 99, steps=60) == [0, 4, 8, 12, 20, 36]
    assert refreshes([0.0, 0.3, 0.9] + [0.5] * 99, steps=40) == [0, 4, 8, 12, 20, 36]
    assert refreshes([0.0, 0.0, 0.9, 0.2] + [0.9] * 99, steps=40) == [0, 4, 8, 12, 16, 20, 28]


def test_the_gap_stays_while_bases_change():
    assert refreshes([0.39] * 99, steps=41) == list(range(0, 41, 4))


def test_a_doubled_gap_is_kept_when_bases_change_again():
    assert refreshes([0.5, 0.5, 0.5] + [0.0] * 99, steps=60) == [0, 4, 8, 12, 20, 28, 36, 44, 52]


def test_a_matrix_has_its_first_turns_when_the_fixed_schedule_has_them():
    for index in range(4):
        fixed = [s for s in range(1, 40) if is_due(s, GAP, index=index, count=4, staggers=True)]
        phase = index * GAP // 4
        assert refreshes([0.0] * 99, steps=40, phase=phase) == [0, *fixed]
        assert refreshes([0.9] * 99, steps=40, phase=phase)[:4] == [0, *fixed[:3]]


def subspace(seed, rows=64, rank=16, *stack):
    return orthonormalise(torch.randn(*stack, rows, rank, generator=torch.Generator().manual_seed(seed)))


def test_the_cosine_is_1_for_one_subspace_and_0_for_unrelated_ones():
    columns = subspace(0)
    turned = columns @ orthonormalise(torch.randn(16, 16, generator=torch.Generator().manual_seed(5)))
    assert Rotation(Basis(columns, None), Basis(turned, None)).cosine().item() == pytest.approx(1, abs=1e-5)
    others = [Rotation(Basis(columns, None), Basis(subspace(seed), None)).cosine() for seed in range(1, 40)]
    assert torch.stack(others).square().mean() < 0.02  # the share of a random subspace, 1/4, is taken off


def test_the_cosine_is_that_of_the_principal_angles():
    rows, rank, angle = 400, 4, 0.7
    old = torch.eye(rows)[:, :rank]
    new = old * torch.cos(torch.tensor(angle)) + torch.eye(rows)[:, rank : 2 * rank] * torch.sin(torch.tensor(angle))
    by_chance = rank / rows
    expected = ((torch.cos(torch.tensor(angle)) ** 2 - by_chance) / (1 - by_chance)) ** 0.5
    assert Rotation(Basis(None, old), Basis(None, new)).cosine().item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_cosine_is_one_number_for_both_sides_and_for_stacks():
    one = Rotation(Basis(subspace(0), subspace(1)), Basis(subspace(0), subspace(2))).cosine()
    assert one.shape == ()
    assert 0.4 < one < 0.8  # the left is the same
    assert Rotation(Basis(subspace(0, 64, 16, 3), None), Basis(subspace(0, 64, 16, 3), None)).cosine().shape == ()


def count_found(monkeypatch, **options):
    counted = []
    find = Bases.find
    monkeypatch.setattr(Bases, "find", lambda self, *a: counted.append(a) or find(self, *a))
    end = train_long(**options)
    monkeypatch.undo()
    return end, len(counted)


def long_data(steps):
    inputs, targets = data()
    repeats = -(-steps // len(inputs))
    return inputs.repeat(repeats, 1, 1), targets.repeat(repeats, 1, 1)


def train_long(optimizer=None, model=None, first=0, last=60, mode="step", micro_batches=1, **options):
    if model is None:
        model = net()
        optimizer = GaLoreAdamW(groups(model, update_proj_gap=3), 1e-3, mode=mode, **options)
    inputs, targets = long_data(last)
    for step in range(first, last):
        for k in range(micro_batches):
            x, y = inputs[step].chunk(micro_batches)[k], targets[step].chunk(micro_batches)[k]
            loss = (model(x) - y).square().mean() / micro_batches
            optimizer.backward(loss, last=k == micro_batches - 1)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


LAZY = {"refresh": "lazy", "refresh_cosine": 0.05, "refresh_window": 2}


def test_a_lazy_run_finds_fewer_bases_and_one_that_is_never_lazy_is_the_fixed_one(monkeypatch):
    fixed, many = count_found(monkeypatch)
    lazy, few = count_found(monkeypatch, **LAZY)
    never, as_many = count_found(monkeypatch, refresh="lazy", refresh_cosine=1.0)
    assert few < many / 2
    assert not torch.equal(fixed, lazy)
    assert as_many == many
    assert torch.equal(never, fixed)


def test_a_run_may_become_lazy_in_a_checkpoint_and_cease_to_be():
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2)
    train(optimizer, model, last=6)
    assert "refreshed" not in optimizer.state[model[0].weight]
    for options in (LAZY, {}):
        fresh = GaLoreAdamW(groups(model), 1e-2, **options)
        fresh.load_state_dict(optimizer.state_dict())
        train(fresh, model, first=6)
        optimizer = fresh
        assert optimizer.state[model[0].weight]["refreshed"][0] == 10  # where lazy; a fixed schedule leaves it
    assert optimizer.state[model[0].weight]["step"] == 18


def test_the_cosines_are_read_on_the_host_once_a_refresh(monkeypatch):
    bases = Bases(Projection(refresh="lazy", refresh_window=1))
    parameter = torch.zeros(8, 8)
    place = Place({"rank": 2, "update_proj_gap": 10, "proj_type": "std", "projects": True}, 0, 0, 1)
    state = {"step": torch.zeros((), dtype=torch.float64)}
    bases.store(state, Basis(None, subspace(0, 8, 2)))
    bases.note_change(parameter, state, place, None)
    reads = []
    read = LazyRefresh._read
    monkeypatch.setattr(LazyRefresh, "_read", lambda self, *a: reads.append(a) or read(self, *a))
    for step in range(1, 10):
        state["step"] = torch.tensor(float(step), dtype=torch.float64)
        assert not bases.is_due(parameter, state, place)
    assert not reads  # a decision is made a gap after the basis was found, and not before
    state["step"] = torch.tensor(10.0, dtype=torch.float64)
    assert bases.is_due(parameter, state, place)
    assert len(reads) == 1


def test_the_default_is_that_of_the_authors():
    assert REFRESH_COSINE == Projection().refresh_cosine == 0.4
    assert Projection().refresh_window == 5
    assert torch.equal(run(refresh="fixed"), run())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_schedule_is_kept_without_waiting_for_the_device():
    lazy, state = LazyRefresh(0.4, 2), {"step": torch.zeros(())}
    parameter = torch.zeros(8, 8, device="cuda")
    basis = Basis(None, subspace(0, 8, 2).cuda())
    lazy.note(parameter, state, None, 0)
    found = []
    try:
        torch.cuda.set_sync_debug_mode("error")
        for step in range(1, 30):
            state["step"] = torch.tensor(float(step))
            if lazy.is_due(parameter, state, GAP, 0):
                found.append(step)
                lazy.note(parameter, state, Rotation(basis, basis), 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found == [4, 8, 16]
    resumed = LazyRefresh(0.4, 2)
    state["step"] = torch.tensor(31.0)
    assert not resumed.is_due(parameter, state, GAP, 0)
    state["step"] = torch.tensor(32.0)
    assert resumed.is_due(parameter, state, GAP, 0)
