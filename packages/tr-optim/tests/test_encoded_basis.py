import pytest
import torch
from galore_runs import distance, groups, net, run, train, weights

from tr_optim import GaLoreAdafactor, GaLoreAdamW
from tr_optim.engine.bases import Bases
from tr_optim.projection.basis import Basis, orthonormalise
from tr_optim.projection.encoded import FORMS, encode, read_encoded
from tr_optim.projection.refresh import Rotation

FEW_BITS = [form for form in FORMS if form != "float32"]
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256}
LARGEST_INNER_PRODUCT = {"float32": 4e-6, "bfloat16": 4e-4, "int8": 1e-3, "int4": 4e-2}
NORM_OF_DEVIATION = {"float32": 2e-5, "bfloat16": 1e-3, "int8": 5e-3, "int4": 1e-1}


def columns(*shape, seed=0, dtype=torch.float32):
    return orthonormalise(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


@pytest.mark.parametrize("form", FORMS)
def test_a_decoded_basis_is_orthonormal_to_the_stated_precision(form):
    kept = columns(4096, 128)
    encoded = encode(Basis(kept, None), form)
    found = encoded.decoded().left
    deviation = found.T @ found - torch.eye(128)
    assert deviation.abs().max() < LARGEST_INNER_PRODUCT[form]
    assert torch.linalg.matrix_norm(deviation, 2) < NORM_OF_DEVIATION[form]
    size = sum(tensor.numel() * tensor.element_size() for tensor in encoded.tensors.values())
    assert size == BYTES[form] * kept.numel()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4096, 8), (33, 5), (7, 1), (3, 40, 6), (2, 9, 4)])
def test_what_is_decoded_has_the_same_codes(form, shape):
    once = encode(Basis(None, columns(*shape)), form)
    assert once.rank == shape[-1]
    assert {"basis_left", "basis_right"} & once.tensors.keys() == {"basis_right"}
    decoded = once.decoded()
    assert decoded.left is None
    assert decoded.right.shape == shape
    again = encode(decoded, form)
    for name, value in once.tensors.items():
        torch.testing.assert_close(again.tensors[name], value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_state_holds_is_read_as_it_was_written(form):
    encoded = encode(Basis(columns(21, 4), columns(30, 4, seed=1)), form)
    read = read_encoded({"step": torch.zeros(()), **encoded.tensors}, torch.zeros(21, 30), torch.float32)
    assert torch.equal(read.decoded().left, encoded.decoded().left)
    assert torch.equal(read.decoded().right, encoded.decoded().right)


def test_a_basis_in_float64_keeps_it():
    basis = Basis(columns(20, 3, dtype=torch.float64), None)
    assert encode(basis, "float32").tensors["basis_left"] is basis.left
    decoded = encode(basis, "int8").decoded().left
    assert decoded.dtype == torch.float64
    assert (decoded - basis.left).abs().max() < 1e-2


def bases_of(optimizer):
    return [state for state in optimizer.state.values() if "basis_left" in state or "basis_right" in state]


@pytest.mark.parametrize("kind", [GaLoreAdamW, GaLoreAdafactor])
@pytest.mark.parametrize("proj_type", ["std", "full"])
@pytest.mark.parametrize("form", FEW_BITS)
def test_training_keeps_bases_in_few_bits_and_ends_near_that_in_full(kind, proj_type, form):
    options = {} if kind is GaLoreAdamW else {"relative_step": False, "scale_parameter": False}
    model = net()
    optimizer = kind(groups(model, proj_type=proj_type), 1e-2, basis_dtype=form, **options)
    end = train(optimizer, model)
    dtype = {"bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}[form]
    for state in bases_of(optimizer):
        kept = [value for name, value in state.items() if name in ("basis_left", "basis_right")]
        assert {value.dtype for value in kept} == {dtype}
        assert ("basis_left_scales" in state) == (form.startswith("int") and "basis_left" in state)
    full = run(kind=kind, projection={"proj_type": proj_type}, **options)
    moved = (full - weights(net())).norm()
    share = {"bfloat16": 0.1, "int8": 0.2, "int4": 0.8}[form]
    assert 0 < (end - full).norm() < share * moved


def test_micro_batches_add_up_where_rounding_leaves_the_codes_as_they_are():
    # A code that rounding turns into its neighbour is 1/127 of the largest number in its block: seldom, and small.
    assert distance(run(basis_dtype="int8"), run("deferred", basis_dtype="int8", micro_batches=4)) < 2e-3
    assert distance(run(), run("deferred", micro_batches=4)) < 1e-6


def test_a_checkpoint_may_be_gone_on_with_in_another_form():
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2)
    train(optimizer, model, last=6)
    for form in ("int8", "int4", "float32"):
        fresh = GaLoreAdamW(groups(model), 1e-2, basis_dtype=form)
        fresh.load_state_dict(optimizer.state_dict())
        train(fresh, model, first=6)  # every matrix has a refresh in these steps
        optimizer = fresh
        kept = {value.dtype for state in bases_of(optimizer) for name, value in state.items() if name[-4:] != "ales"}
        assert ({"int8": torch.int8, "int4": torch.uint8}.get(form, torch.float32)) in kept
        assert any("basis_right_scales" in state for state in bases_of(optimizer)) == (form != "float32")


@pytest.mark.parametrize("form", FEW_BITS)
def test_moments_are_rotated_by_the_bases_that_are_projected_on(form, monkeypatch):
    turned = []
    begin = Rotation.__init__

    def note(self, old, new, *others):
        turned.append((old, new))
        begin(self, old, new, *others)

    monkeypatch.setattr(Rotation, "__init__", note)
    projected_on = []
    down = Basis.down
    monkeypatch.setattr(Basis, "down", lambda self, g: projected_on.append(self) or down(self, g))
    run(basis_dtype=form)
    assert len(turned) > 3

    def same(one, other):
        sides = ((one.left, other.left), (one.right, other.right))
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in sides)

    for pair in turned:
        for basis in pair:
            assert any(same(basis, used) for used in projected_on)


def test_asking_whether_a_basis_is_due_decodes_nothing(monkeypatch):
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, basis_dtype="int8")
    train(optimizer, model, last=2)
    monkeypatch.setattr(Bases, "current", None)
    for parameter, place in optimizer.numbered():
        if place.is_projected:
            optimizer._bases.is_due(parameter, optimizer.state[parameter], place)


def test_a_new_basis_waits_for_its_step_in_few_bits():
    model = net(bias=False)
    optimizer = GaLoreAdamW(model.parameters(), 1e-2, rank=8, mode="deferred", basis_dtype="int8")
    optimizer.backward(model(torch.randn(4, 48)).square().mean())
    waiting = optimizer._gathering.window.bases
    assert len(waiting) == 3
    assert {value.dtype for kept in waiting.values() for value in kept.tensors.values()} == {torch.int8, torch.float32}
