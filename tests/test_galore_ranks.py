"""GaLore over several gloo processes: the numbers are those of one process, and all ranks hold the same bits."""

import pytest
import torch
from shared.projections import STEPS, Counted, Regressor, data, groups, rows, weights
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_optim import GaLoreAdafactor, GaLoreAdamW


def net(statistics=False):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(24) if statistics else nn.Identity()
    # No bias before it: its gradient is rounding, which Adam makes a step of.
    return nn.Sequential(
        nn.Linear(16, 24, bias=not statistics),
        norm,
        nn.Tanh(),
        nn.Linear(24, 32, bias=False),
        nn.Tanh(),
        nn.Linear(32, 8),
    )


def build(model, options):
    options = dict(options)
    kind = GaLoreAdafactor if options.pop("adafactor", False) else GaLoreAdamW
    if kind is GaLoreAdafactor:
        options["relative_step"] = False
    return kind(groups(model), 1e-2, mode="deferred", weight_decay=0.1, **options)


def train(model, optimizer, rank, world_size, micro_batches, max_norm=None):
    inputs, targets = data()
    norms = []
    for step in range(STEPS):
        # A rank's share, in micro-batches that together with those of the other ranks are those of one process.
        xs = inputs[step].chunk(world_size)[rank].chunk(micro_batches)
        ys = targets[step].chunk(world_size)[rank].chunk(micro_batches)
        for k in range(micro_batches):
            loss = (model(xs[k]) - ys[k]).square().mean() / micro_batches
            optimizer.backward(loss, last=k == micro_batches - 1)
        norms.append(optimizer.clip_grad_norm(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_on_rank(options, micro_batches, max_norm):
    with DDP(use_cpu=True) as strategy:
        model = net()
        optimizer, collectives = build(model, options), Counted(strategy)
        optimizer.bind(collectives)
        norms = train(model, optimizer, strategy.rank, strategy.world_size, micro_batches, max_norm)
        return weights(model), norms, collectives.elements, optimizer.norm_is_estimated


SETTINGS = {
    "projected": (2, {}, 1, 1e-6),
    "projected, three ranks": (3, {}, 1, 1e-6),
    "projected, accumulated": (2, {}, 2, 1e-6),
    "whole": (2, {"reduction": "whole"}, 1, 1e-6),
    "whole, three ranks": (3, {"reduction": "whole"}, 1, 1e-6),
    "whole, accumulated": (2, {"reduction": "whole"}, 3, 1e-6),
    "adafactor": (2, {"adafactor": True}, 1, 1e-6),
    "svd": (2, {"method": "svd"}, 1, 1e-5),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_end_as_one_process_with_the_union_of_their_batches(setting):
    world_size, options, micro_batches, tolerance = SETTINGS[setting]
    alone = net()
    optimizer = build(alone, {name: value for name, value in options.items() if name != "reduction"})
    norms = train(alone, optimizer, 0, 1, 1)
    results = run_ranks(train_on_rank, world_size, options, micro_batches, None)
    for shared, _, _, is_estimated in results:
        assert torch.equal(shared, results[0][0])
        assert (shared - weights(alone)).abs().max() < tolerance
        assert is_estimated == (options.get("reduction") != "whole" or micro_batches > 1)
    assert (weights(alone) - weights(net())).abs().max() > 1e-2
    if options.get("reduction") == "whole" and micro_batches == 1:
        assert norms == pytest.approx(results[0][1], rel=1e-5)
    assert norms == pytest.approx(results[0][1], rel=0.2)


def test_clipping_with_whole_gradients_exchanged_is_that_of_one_process():
    alone = net()
    train(alone, build(alone, {}), 0, 1, 1, 0.1)
    results = run_ranks(train_on_rank, 2, {"reduction": "whole"}, 1, 0.1)
    assert torch.equal(results[0][0], results[1][0])
    assert (results[0][0] - weights(alone)).abs().max() < 1e-6


def test_bases_from_the_first_micro_batch_leave_ranks_with_the_same_bits():
    alone = net()
    train(alone, build(alone, {}), 0, 1, 1)
    results = run_ranks(train_on_rank, 2, {"refresh_from": "first"}, 2, None)
    assert torch.equal(results[0][0], results[1][0])
    assert 1e-6 < (results[0][0] - weights(alone)).abs().max() < 0.1  # another run than one big batch, and no wild one


def test_clipping_by_an_estimate_leaves_ranks_with_the_same_bits():
    results = run_ranks(train_on_rank, 2, {}, 2, 0.1)
    assert torch.equal(results[0][0], results[1][0])


def wide_on_rank(clips):
    with DDP(use_cpu=True) as strategy:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Tanh(), nn.Linear(256, 128, bias=False))
        made = [{"params": list(model.parameters()), "rank": 32, "update_proj_gap": 100}]
        optimizer = GaLoreAdamW(made, 1e-3, mode="deferred", stagger=False)
        collectives = Counted(strategy)
        optimizer.bind(collectives)
        carried = []
        for step in range(4):
            collectives.elements.clear()
            x = torch.randn(4, 128, generator=torch.Generator().manual_seed(2 * step + strategy.rank))
            optimizer.backward(model(x).square().mean())
            if clips:
                optimizer.clip_grad_norm(1.0)
            optimizer.step()
            carried.append(sum(collectives.elements) / sum(p.numel() for p in model.parameters()))
        return carried


@pytest.mark.parametrize(("clips", "besides"), [(False, 0), (True, 64 * 64)])
def test_a_rank_of_a_quarter_exchanges_a_quarter_and_for_the_norm_one_sketch_of_the_model(clips, besides):
    for carried in run_ranks(wide_on_rank, 2, clips):
        assert carried[1:] == [0.25 + besides / (2 * 128 * 256)] * 3


def dynamic_on_rank():
    """The ranks get their gradients in different orders."""
    with DDP(use_cpu=True) as strategy:
        torch.manual_seed(0)
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        model = nn.ModuleList([first, second])
        optimizer = GaLoreAdamW(
            [{"params": [p for p in model.parameters() if p.dim() == 2], "rank": 2, "update_proj_gap": 2}],
            1e-2,
            mode="deferred",
        )
        optimizer.bind(strategy)
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            order = (first, second) if strategy.rank == 0 else (second, first)
            for layer in order:
                x = torch.tanh(layer(x))
            optimizer.backward(x.square().mean())
            optimizer.step()
        return weights(model)


def test_ranks_whose_gradients_come_in_different_orders_agree():
    first, second = run_ranks(dynamic_on_rank, 2)
    assert torch.equal(first, second)


def unused_on_rank(due):
    with DDP(use_cpu=True) as strategy:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
        optimizer = GaLoreAdamW(
            [{"params": list(model.parameters()), "rank": 2, "update_proj_gap": 50}], 1e-2, mode="deferred"
        )
        optimizer.bind(strategy)
        x = torch.ones(4, 8)
        if not due:
            optimizer.backward(model[1](model[0](x)).square().mean())
            optimizer.step()
        optimizer.backward(model[0](x).square().mean())


@pytest.mark.parametrize("due", [True, False])
def test_a_parameter_without_a_gradient_is_an_error_in_words(due):
    with pytest.raises(RuntimeError, match="1 trainable parameters got no gradient on this rank"):
        run_ranks(unused_on_rank, 2, due)


def immediate_on_rank():
    with DDP(use_cpu=True) as strategy:
        model = net()
        GaLoreAdamW(groups(model), 1e-2, mode="immediate").bind(strategy)


def test_immediate_updates_of_projections_are_for_one_process():
    with pytest.raises(
        ValueError, match="reduction='projected' is for one process, and there are 2.* or reduction='whole'"
    ):
        run_ranks(immediate_on_rank, 2)


def trainer_on_rank(folder, options, statistics=False, resume=None):
    args = TrainingArguments(
        output_dir=folder,
        **{
            "optim": "galore_adamw_layerwise",
            "optim_target_modules": "mlp",
            "optim_args": "rank=4, update_proj_gap=3, scale=1.0",
            "max_steps": 8,
            "learning_rate": 1e-2,
            "max_grad_norm": 0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "log_level": "error",
            **options,
        },
    )
    trainer = Trainer(Regressor(net(statistics)), args, train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    buffers = [b.clone() for b in trainer.model.buffers()]
    result = weights(trainer.model), norms, buffers
    trainer.strategy.close()
    return result


@pytest.mark.parametrize("name", ["galore_adamw", "galore_adafactor"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_ends_alike_on_one_process_and_on_two(tmp_path, name, accumulation):
    alone, _, _ = trainer_on_rank(str(tmp_path), {"optim": name, "per_device_train_batch_size": 8})
    for suffix in ("", "_layerwise"):
        options = {
            "optim": name + suffix,
            "per_device_train_batch_size": 4 // accumulation,
            "gradient_accumulation_steps": accumulation,
        }
        results = run_ranks(trainer_on_rank, 2, str(tmp_path), options)
        assert torch.equal(results[0][0], results[1][0])
        assert (results[0][0] - alone).abs().max() < 1e-6


def test_running_statistics_are_those_of_the_first_rank_as_with_any_optimizer(tmp_path):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
    results = {
        name: run_ranks(trainer_on_rank, 2, str(tmp_path), {**options, "optim": name}, True)
        for name in ("galore_adamw", "galore_adamw_layerwise")
    }
    for rank in range(2):
        pairs = zip(results["galore_adamw"][rank][2], results["galore_adamw_layerwise"][rank][2], strict=True)
        for usual, layerwise in pairs:
            torch.testing.assert_close(usual, layerwise, rtol=1e-5, atol=1e-6)
