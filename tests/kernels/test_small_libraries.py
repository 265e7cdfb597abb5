"""schedulefree, torch-optimi and grokadamw behind tr-optim's adapters: their numbers, states that can be saved."""

import copy
import logging
import subprocess
import sys

import optimi
import pytest
import schedulefree
import torch
from adapter_runs import check_resume_at_every_step, train, train_in_shards, trainer_of, weights
from kernel_steps import check_state, net, step

from tr_dist.testing import run_ranks
from tr_optim.adapters.grokadamw import GrokAdamW
from tr_optim.adapters.optimi import OptimiStableAdamW
from tr_optim.adapters.schedulefree import ScheduleFreeAdamW, ScheduleFreeRAdam, ScheduleFreeSGD

ADAM = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
FREE = {"weight_lr_power": 1.0, "r": 0.5}


def grokadamw_of_the_library(parameters, **options):
    """Build the library's own, whose import gives the root logger a handler."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    from grokadamw import GrokAdamW as Library

    root.handlers[:], root.level = before
    return Library(parameters, **options)


PAIRS = [
    (ScheduleFreeAdamW, schedulefree.AdamWScheduleFree, {**ADAM, **FREE, "warmup_steps": 3}),
    (ScheduleFreeRAdam, schedulefree.RAdamScheduleFree, {**ADAM, **FREE}),
    (ScheduleFreeSGD, schedulefree.SGDScheduleFree, {"lr": 1e-2, "weight_decay": 0.1, **FREE, "warmup_steps": 3}),
    (OptimiStableAdamW, optimi.StableAdamW, ADAM),
    (OptimiStableAdamW, optimi.StableAdamW, {**ADAM, "kahan_sum": True, "decouple_lr": False, "max_lr": 1e-2}),
    (GrokAdamW, grokadamw_of_the_library, {**ADAM, "lamb": 1.5, "gamma": 0.2, "gradient_clipping": 0.05}),
]


def stepped(model, optimizer, steps=range(12)):
    """Step an optimizer, which trains before and is evaluated after if it has two sets of weights."""
    has_modes = hasattr(optimizer, "train")
    if has_modes:
        optimizer.train()
    found = step(model, optimizer, steps)
    if has_modes:
        optimizer.eval()
        found = torch.cat([found, *[p.detach().flatten().float() for p in model.parameters()]])
        optimizer.train()
    return found


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast:FutureWarning", "ignore:User provided device_type")
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("adapter", "library", "options"), PAIRS)
def test_weights_are_the_librarys_bit_for_bit(adapter, library, options, dtype):
    ours, theirs = net(dtype), net(dtype)
    found = stepped(ours, adapter(ours.parameters(), **options))
    assert torch.equal(found, stepped(theirs, library(theirs.parameters(), **options)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("adapter", "library", "options"), PAIRS)
def test_a_state_is_plain_tensors_that_are_loaded_as_copies_and_go_on_bit_for_bit(adapter, library, options, dtype):
    check_state(adapter, options, dtype, run=stepped)


def test_stable_adamw_trains_on_the_cpu_where_triton_is_installed(monkeypatch):
    """As on XLA: the library takes Triton's kernels for every device, since it asks about no parameter at all."""
    monkeypatch.setattr(optimi.utils, "HAS_TRITON", True)
    ours, plain = net(), net()
    found = step(ours, OptimiStableAdamW(ours.parameters(), **ADAM))
    assert torch.equal(found, step(plain, optimi.StableAdamW(plain.parameters(), **ADAM, triton=False)))


def test_a_state_of_torch_optimi_itself_goes_on():
    theirs = net()
    library = optimi.StableAdamW(theirs.parameters(), **ADAM)
    step(theirs, library, range(7))
    ours = copy.deepcopy(theirs)
    optimizer = OptimiStableAdamW(ours.parameters(), **ADAM)
    optimizer.load_state_dict(copy.deepcopy(library.state_dict()))
    assert torch.equal(step(ours, optimizer, range(7, 12)), step(theirs, library, range(7, 12)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("schedule_free_adamw", {"warmup_steps": 2, "lr_scheduler_type": "constant", "optim_args": "r=0.5"}),
        ("schedule_free_radam", {"lr_scheduler_type": "constant"}),
        ("schedule_free_sgd", {"lr_scheduler_type": "constant"}),
        ("stable_adamw", {"optim_args": "kahan_sum=true"}),
        ("stable_adamw", {"bf16": True}),
        ("grokadamw", {"optim_args": "lamb=1.5, gradient_clipping=0.5"}),
    ],
)
def test_a_run_resumed_at_any_step_ends_as_if_it_had_not_stopped(tmp_path, name, options):
    check_resume_at_every_step(tmp_path, optim=name, **options)


def test_a_run_uses_what_its_arguments_say(tmp_path):
    given = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "weight_decay": 0.2}
    for name in ("schedule_free_adamw", "stable_adamw", "grokadamw"):
        groups = trainer_of(tmp_path, optim=name, **given).create_optimizer().param_groups
        for group in groups:
            assert group["eps"] == 1e-5
            assert (group.get("betas") or (group["beta1"], group["beta2"])) == (0.8, 0.95)
        assert [group["weight_decay"] for group in groups] == [0.2, 0.0]


def test_a_run_without_schedule_evaluates_and_ends_with_the_average_of_its_weights(tmp_path):
    trainer = train(tmp_path, optim="schedule_free_sgd", lr_scheduler_type="constant")
    averaged = weights(trainer)
    trainer.optimizer.train()
    assert not torch.equal(weights(trainer), averaged)
    trainer.optimizer.eval()
    torch.testing.assert_close(weights(trainer), averaged)


@pytest.mark.parametrize("adapter", [ScheduleFreeAdamW, ScheduleFreeRAdam, ScheduleFreeSGD])
def test_an_evaluation_leaves_the_bits_of_the_training_weights(adapter):
    model, plain = net(), net()
    optimizer, reference = adapter(model.parameters(), lr=1e-2), adapter(plain.parameters(), lr=1e-2)
    optimizer.train()
    reference.train()
    for steps in (range(8), range(8, 12)):
        before = step(model, optimizer, steps)
        optimizer.eval()
        optimizer.eval()
        assert not torch.equal(model[0].weight.flatten(), before[:8192])
        optimizer.train()
        optimizer.train()
        assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), before)
    assert torch.equal(before, step(plain, reference))


def test_weights_that_are_loaded_during_an_evaluation_stay():
    model = net()
    optimizer = ScheduleFreeSGD(model.parameters(), lr=1e-2)
    optimizer.train()
    step(model, optimizer, range(5))
    optimizer.eval()
    model.load_state_dict({name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()})
    optimizer.train()
    assert model[0].weight.mean() > 2


def test_a_share_of_the_run_for_warmup_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give a whole number of steps, or use schedule_free_radam"):
        trainer_of(tmp_path, optim="schedule_free_adamw", warmup_steps=0.1).train()


@pytest.mark.parametrize("name", ["schedule_free_sgd", "stable_adamw", "grokadamw"])
def test_divided_parameters_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"is a DTensor.*train with replicas \(strategy='ddp'\)"):
        run_ranks(train_in_shards, 2, str(tmp_path), {"optim": name}, timeout_s=120)


def test_importing_grokadamw_leaves_the_loggers_alone():
    code = (
        "import logging, tr_optim.adapters.grokadamw; root = logging.getLogger(); "
        "assert not root.handlers and root.level == logging.WARNING"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
