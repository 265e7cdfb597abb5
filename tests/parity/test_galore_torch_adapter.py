"""galore-torch's own classes behind tr-optim's adapter: the library's numbers, without its faults."""

import copy
import io
import os
import re

import pytest
import torch
from adapter_runs import check_resume_at_every_step, check_same_tensors, train, train_in_shards, trainer_of, weights
from parity_libraries import modules_of
from torch import nn

from tr_dist.testing import run_ranks
from tr_optim import GaLoreAdafactor, GaLoreAdamW
from tr_optim.adapters.galore_torch import GaLoreTorchAdafactor, GaLoreTorchAdamW

PROJ_TYPES = ["std", "reverse_std", "right", "left", "full"]
STEPS = 12
ADAMW = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
ADAFACTOR = {"lr": 1e-2, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1}
UNSCALED = {"lr": 1e-2, "relative_step": False, "scale_parameter": False}
CLASSES = [
    (GaLoreTorchAdamW, GaLoreAdamW, ADAMW),
    (GaLoreTorchAdafactor, GaLoreAdafactor, ADAFACTOR),
    (GaLoreTorchAdafactor, GaLoreAdafactor, UNSCALED),
]
OPTIONS = {"optim_target_modules": "all-linear", "optim_args": "rank=4, update_proj_gap=2, scale=1.0"}


@pytest.fixture(scope="module")
def library():
    adamw, adafactor = modules_of("galore_torch", "adamw", "adafactor")
    return {GaLoreTorchAdamW: adamw.AdamW, GaLoreTorchAdafactor: adafactor.Adafactor}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 32, bias=False), nn.Tanh(), nn.Linear(32, 32)
    return nn.Sequential(*layers).to(dtype)


def groups(model, proj_type="std", rank=6, gap=5, scale=0.5):
    projection = {"rank": rank, "update_proj_gap": gap, "scale": scale, "proj_type": proj_type}
    return [
        {"params": [p for p in model.parameters() if p.dim() == 1]},
        {"params": [p for p in model.parameters() if p.dim() == 2], **projection},
    ]


def step(model, optimizer, steps=range(STEPS)):
    """Apply the same gradients whatever the weights are, so that rounding cannot turn a singular vector."""
    generator = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(STEPS)]
    for number in steps:
        for parameter, gradient in zip(model.parameters(), gradients[number], strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


@pytest.mark.parametrize("proj_type", PROJ_TYPES)
@pytest.mark.parametrize(("adapter", "own", "options"), CLASSES)
def test_weights_are_the_librarys_bit_for_bit_and_those_of_our_own_class(library, proj_type, adapter, own, options):
    kind = library[adapter]
    quiet = {"no_deprecation_warning": True} if adapter is GaLoreTorchAdamW else {}
    models = [net() for _ in range(3)]
    found = step(models[0], adapter(groups(models[0], proj_type), **options))
    raw = step(models[1], kind(groups(models[1], proj_type), **options, **quiet))
    ours = step(models[2], own(groups(models[2], proj_type), **options, compat="galore-torch"))
    assert torch.equal(found, raw)
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-6)
    assert (found - torch.cat([p.detach().flatten() for p in net().parameters()])).abs().max() > 1e-3


def test_a_rank_above_the_shorter_side_is_that_side_with_our_own_class_too(library):
    ours, theirs = net(), net()
    reference = library[GaLoreTorchAdamW](groups(theirs, rank=100), **ADAMW, no_deprecation_warning=True)
    optimizer = GaLoreAdamW(groups(ours, rank=100), **ADAMW, compat="galore-torch")
    torch.testing.assert_close(step(ours, optimizer), step(theirs, reference), rtol=0, atol=1e-6)


@pytest.mark.parametrize("proj_type", PROJ_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("adapter", "own", "options"), CLASSES)
def test_a_state_is_tensors_that_are_loaded_as_copies_and_go_on_bit_for_bit(proj_type, dtype, adapter, own, options):
    whole, first = net(dtype), net(dtype)
    optimizer = adapter(groups(first, proj_type), **options)
    expected = step(whole, reference := adapter(groups(whole, proj_type), **options))
    step(first, optimizer, range(7))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = copy.deepcopy(first)
    resumed = adapter(groups(second, proj_type), **options)
    resumed.load_state_dict(saved)
    untouched = copy.deepcopy(saved["state"])
    assert torch.equal(step(second, resumed, range(7, STEPS)), expected)
    check_same_tensors(resumed.state_dict()["state"], reference.state_dict()["state"])
    check_same_tensors(saved["state"], untouched)


def test_the_librarys_state_is_no_tensors_and_is_shared_by_whom_loads_it(library):
    model = net()
    optimizer = library[GaLoreTorchAdamW](groups(model), no_deprecation_warning=True)
    step(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    with pytest.raises(Exception, match="GaLoreProjector"):
        torch.load(file, weights_only=True)
    other = library[GaLoreTorchAdamW](groups(model), no_deprecation_warning=True)
    other.load_state_dict(optimizer.state_dict())
    matrix = model[0].weight
    assert other.state[matrix]["projector"] is optimizer.state[matrix]["projector"]


@pytest.mark.parametrize("proj_type", PROJ_TYPES)
def test_a_state_that_the_library_saved_is_read_without_running_what_is_in_it_and_goes_on(library, proj_type):
    model = net()
    optimizer = library[GaLoreTorchAdamW](groups(model, proj_type), **ADAMW, no_deprecation_warning=True)
    step(model, optimizer, range(7))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    [projector] = modules_of("galore_torch", "galore_projector")
    with torch.serialization.safe_globals([projector.GaLoreProjector]):
        saved = torch.load(file, weights_only=True)
    copied = copy.deepcopy(model)
    resumed = GaLoreTorchAdamW(groups(copied, proj_type), **ADAMW)
    resumed.load_state_dict(saved)
    expected = step(model, optimizer, range(7, STEPS))
    torch.testing.assert_close(step(copied, resumed, range(7, STEPS)), expected, rtol=0, atol=1e-6)
    assert all(type(v) is torch.Tensor for s in resumed.state_dict()["state"].values() for v in s.values())


@pytest.mark.parametrize("proj_type", PROJ_TYPES)
@pytest.mark.parametrize(("adapter", "own", "options"), CLASSES)
def test_our_own_class_goes_on_with_a_state_and_back(proj_type, adapter, own, options):
    model = net()
    optimizer = adapter(groups(model, proj_type), **options)
    step(model, optimizer, range(7))
    copied = copy.deepcopy(model)
    other = own(groups(copied, proj_type), **options, compat="galore-torch")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = copy.deepcopy(model)
    back = adapter(groups(again, proj_type), **options)
    back.load_state_dict(copy.deepcopy(other.state_dict()))
    expected = step(model, optimizer, range(7, STEPS))
    torch.testing.assert_close(step(copied, other, range(7, STEPS)), expected, rtol=0, atol=1e-6)
    if adapter is GaLoreTorchAdamW:
        assert torch.equal(step(again, back, range(7, STEPS)), expected)


def test_bases_take_no_more_memory_than_their_own(library):
    def held(optimizer, model):
        state = optimizer.state[model[4].weight]
        basis = state["projector"].ortho_matrix if "projector" in state else state["basis_right"]
        return basis.untyped_storage().nbytes()

    ours, theirs = net(), net()
    optimizer = GaLoreTorchAdamW(groups(ours))
    raw = library[GaLoreTorchAdamW](groups(theirs), no_deprecation_warning=True)
    step(ours, optimizer, range(1))
    step(theirs, raw, range(1))
    assert (held(optimizer, ours), held(raw, theirs)) == (32 * 6 * 4, 32 * 32 * 4)


def test_step_takes_a_closure(library):
    def closure():
        loss = model(torch.ones(2, 24)).square().mean()
        loss.backward()
        return loss

    model = net()
    before = model[0].weight.detach().clone()
    assert GaLoreTorchAdamW(groups(model)).step(closure).item() > 0
    assert not torch.equal(before, model[0].weight)
    model = net()
    with pytest.raises(RuntimeError, match="does not require grad"):
        library[GaLoreTorchAdamW](groups(model), no_deprecation_warning=True).step(closure)


@pytest.mark.parametrize("adapter", [GaLoreTorchAdamW, GaLoreTorchAdafactor])
def test_the_long_side_is_projected_at_any_rank_where_the_library_fails(library, adapter):
    def build(kind, **options):
        model = nn.Sequential(nn.Linear(24, 6, bias=False), nn.Linear(6, 24, bias=False))
        parameters = {"params": list(model.parameters()), "rank": 10, "update_proj_gap": 2, "scale": 1.0}
        return model, kind([{**parameters, "proj_type": "reverse_std"}], lr=1e-2, **options)

    relative = {} if adapter is GaLoreTorchAdamW else {"relative_step": False}
    quiet = {"no_deprecation_warning": True} if adapter is GaLoreTorchAdamW else {}
    with pytest.raises(RuntimeError, match="mat1 and mat2|shapes"):
        step(*build(library[adapter], **relative, **quiet))
    assert step(*build(adapter, **relative)).isfinite().all()


def test_scale_and_gap_of_a_group_count_from_when_they_change(library):
    def changed(kind, **options):
        model = net()
        optimizer = kind(groups(model, gap=100), **ADAMW, **options)
        step(model, optimizer, range(3))
        basis = bases(optimizer, model)
        optimizer.param_groups[1].update(scale=2.0, update_proj_gap=2)
        before = model[4].weight.detach().clone()
        step(model, optimizer, range(3, 5))
        return (model[4].weight - before).norm(), torch.equal(basis, bases(optimizer, model))

    def bases(optimizer, model):
        state = optimizer.state[model[4].weight]
        return (state["projector"].ortho_matrix if "projector" in state else state["basis_right"].mT).clone()

    ours, stays = changed(GaLoreTorchAdamW)
    theirs, stays_with_theirs = changed(library[GaLoreTorchAdamW], no_deprecation_warning=True)
    assert (stays, stays_with_theirs) == (False, True)
    assert ours > 2 * theirs


def test_another_rank_or_side_than_the_states_is_refused_before_anything_changes():
    model = net()
    optimizer = GaLoreTorchAdamW(groups(model))
    step(model, optimizer, range(2))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[1]["rank"] = 8
    message = (
        r"GaLoreTorchAdamW: the state of a parameter of shape \(40, 24\) is of rank 6, and its group now has rank=8"
    )
    with pytest.raises(ValueError, match=message + ".*use tr_optim.GaLoreAdamW"):
        step(model, optimizer, range(2, 3))
    optimizer.param_groups[1].update(rank=6, proj_type="left")
    with pytest.raises(ValueError, match="has basis_right, and basis_left is needed"):
        step(model, optimizer, range(2, 3))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.param_groups[1]["proj_type"] = "std"
    step(model, optimizer, range(2, 3))
    assert all(type(value) is torch.Tensor for state in optimizer.state.values() for value in state.values())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["proj_type"] = "left"
    with pytest.raises(ValueError, match="has basis_right, and basis_left is needed"):
        GaLoreTorchAdamW(groups(model)).load_state_dict(saved)


def test_a_step_that_fails_leaves_tensors_behind():
    model = net()
    optimizer = GaLoreTorchAdamW(groups(model, gap=1))
    step(model, optimizer, range(2))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(torch.linalg.LinAlgError):
        optimizer.step()
    assert all(type(value) is torch.Tensor for state in optimizer.state.values() for value in state.values())
    assert "rank" in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (nn.Parameter(torch.ones(8)), "has one dimension.*FSDP1 and ZeRO make them, use tr_optim.GaLoreAdamW"),
        (nn.Parameter(torch.ones(2, 3, 4)), "is not a matrix.*use tr_optim.GaLoreAdamW, which projects stacks"),
        (nn.Parameter(torch.ones(2, 3, 4, 4)), "is not a matrix"),
        (nn.Parameter(torch.ones(4, 4, dtype=torch.complex64)), "is complex"),
    ],
)
def test_what_the_library_cannot_project_is_refused(parameter, message):
    with pytest.raises(ValueError, match=message):
        GaLoreTorchAdamW([parameter], rank=4)
    with pytest.raises(ValueError, match=message.replace("AdamW", "Adafactor")):
        GaLoreTorchAdafactor([parameter], lr=1e-3, relative_step=False, rank=4)
    GaLoreTorchAdamW([parameter])


def test_weights_that_were_flattened_since_are_refused_in_words_where_the_library_finds_no_second_dimension(library):
    def flattened(kind, **options):
        model = net()
        optimizer = kind(groups(model), **options)
        weight = model[0].weight
        weight.data = weight.data.flatten()
        weight.grad = torch.ones_like(weight)
        return optimizer

    with pytest.raises(ValueError, match="one dimension.*as FSDP1 and ZeRO make them, use tr_optim.GaLoreAdamW"):
        flattened(GaLoreTorchAdamW).step()
    with pytest.raises(IndexError):
        flattened(library[GaLoreTorchAdamW], no_deprecation_warning=True).step()


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 2.5}, {"update_proj_gap": 0}, {"scale": 0.0}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"GaLoreTorchAdamW: {next(iter(options))}="):
        GaLoreTorchAdamW([nn.Parameter(torch.ones(4, 4))], **{"rank": 2, **options})


@pytest.mark.parametrize("name", ["galore_torch_adamw", "galore_torch_adafactor"])
def test_a_run_resumed_at_any_step_ends_as_if_it_had_not_stopped(tmp_path, name):
    trainer = check_resume_at_every_step(tmp_path, optim=name, **OPTIONS)
    assert len([group for group in trainer.optimizer.param_groups if group["projects"]]) == 1


def test_a_run_uses_what_its_arguments_say(tmp_path):
    adam = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "optim_args": "rank=4, correct_bias=false"}
    trainer = trainer_of(tmp_path, optim="galore_torch_adamw", **{**OPTIONS, **adam})
    trainer.create_optimizer()
    for group in trainer.optimizer.param_groups:
        assert (group["betas"], group["eps"], group["correct_bias"]) == ((0.8, 0.95), 1e-5, False)
        if group["projects"]:
            assert (group["rank"], group["update_proj_gap"], group["scale"]) == (4, 200, 0.25)
    assert [(g["projects"], g["weight_decay"]) for g in trainer.optimizer.param_groups] == [
        (True, 0.1),
        (False, 0.1),
        (False, 0.0),
    ]


def test_a_run_is_that_of_our_own_class_in_its_way(tmp_path):
    """One refresh only: after more, rounding may turn the library's singular vectors."""
    options = {"optim_target_modules": "all-linear", "max_grad_norm": 0.5}
    theirs = train(tmp_path, optim="galore_torch_adamw", optim_args="rank=4, scale=1.0", **options)
    ours = train(tmp_path, optim="galore_adamw", optim_args="rank=4, scale=1.0, compat=galore-torch", **options)
    torch.testing.assert_close(weights(theirs), weights(ours), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim": "galore_torch_adamw", "optim_target_modules": None}, "optim_target_modules names, and it is None"),
        ({"optim": "galore_torch_adamw", "optim_args": "mode=deferred"}, "galore_torch_adamw does not take 'mode'"),
        ({"optim": "galore_torch_adafactor", "optim_args": "rnk=2"}, "did you mean rank?"),
        ({"optim": "galore_torch_adamw_8bit"}, "never change, and nothing says so.* Use optim='galore_adamw_8bit'"),
    ],
)
def test_a_run_is_refused_in_words(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **{**OPTIONS, **options}).train()


def test_a_changed_rank_is_refused_on_resume(tmp_path):
    train(tmp_path, optim="galore_torch_adamw", save_strategy="steps", save_steps=3, **OPTIONS)
    changed = {**OPTIONS, "optim_args": "rank=8, update_proj_gap=2, scale=1.0"}
    with pytest.raises(ValueError, match=re.escape("is of rank 4, and its group now has rank=8")):
        train(tmp_path, optim="galore_torch_adamw", resume=str(tmp_path / "checkpoint-3"), **changed)


def train_as_rank(folder, threads):
    rank = int(os.environ["RANK"])
    torch.set_num_threads(threads[rank])
    return weights(train(folder, optim="galore_torch_adamw", strategy="ddp", **OPTIONS)).tolist()


def test_ranks_on_like_hardware_stay_equal_bit_for_bit(tmp_path):
    first, second = run_ranks(train_as_rank, 2, str(tmp_path), (1, 1), timeout_s=120)
    assert first == second


def test_ranks_on_unlike_hardware_are_refused(tmp_path):
    message = "optim='galore_torch_adamw' decomposes each gradient.*rank 0 on .* with 1 threads.*rank 1 on .* 2 threads"
    with pytest.raises(ValueError, match=message + ".*use optim='galore_adamw'"):
        run_ranks(train_as_rank, 2, str(tmp_path), (1, 2), timeout_s=120)


@pytest.mark.parametrize("name", ["galore_torch_adamw", "galore_torch_adafactor"])
def test_divided_parameters_are_refused(tmp_path, name):
    own = "GaLoreAdamW" if name.endswith("adamw") else "GaLoreAdafactor"
    message = f"is a DTensor.*would gather its whole gradient, and decompose it, on every rank; use tr_optim.{own}"
    with pytest.raises(ValueError, match=message):
        run_ranks(train_in_shards, 2, str(tmp_path), {"optim": name, **OPTIONS}, timeout_s=120)
