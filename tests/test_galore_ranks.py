"""GaLore, APOLLO and Fira over several gloo processes: the numbers of one process, and the same bits on all ranks."""

from dataclasses import dataclass, field

import pytest
import torch
from shared.projections import STEPS, Counted, Regressor, data, groups, rows, weights
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_optim import APOLLOAdamW, FiraAdamW, GaLoreAdafactor, GaLoreAdamW


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


@dataclass(frozen=True)
class Way:
    """One way to train in ranks.

    Attributes:
        kind: the optimizer.
        options: of it.
        world_size: number of ranks.
        micro_batches: of a step, in each rank.
        max_norm: to clip to.
        tolerance: how far weights may be from those of one process.
    """

    kind: type = GaLoreAdamW
    options: dict = field(default_factory=dict)
    world_size: int = 2
    micro_batches: int = 1
    max_norm: float | None = None
    tolerance: float = 1e-6

    def build(self, model, **changes):
        options = {"mode": "deferred", "weight_decay": 0.1, **self.options, **changes}
        if self.kind is GaLoreAdafactor:
            options["relative_step"] = False
        return self.kind(groups(model), 1e-2, **options)


WHOLE = {"reduction": "whole"}
# A seed by which no projection is small by chance, so that rounding is not made large.
IMMEDIATE = {"mode": "immediate", "seed": 1}
WAYS = {
    "projected": Way(),
    "projected, three ranks": Way(world_size=3),
    "projected, accumulated": Way(micro_batches=2),
    "whole": Way(options=WHOLE),
    "whole, clipped": Way(options=WHOLE, max_norm=0.1),
    "whole, three ranks": Way(options=WHOLE, world_size=3),
    "whole, accumulated": Way(options=WHOLE, micro_batches=3),
    "adafactor": Way(GaLoreAdafactor),
    "svd": Way(options={"method": "svd"}, tolerance=1e-5),
    "apollo": Way(APOLLOAdamW, IMMEDIATE),
    "apollo, three ranks, accumulated, clipped": Way(APOLLOAdamW, IMMEDIATE, 3, 2, 0.1),
    "fira, clipped": Way(FiraAdamW, IMMEDIATE, max_norm=0.1),
    "fira, accumulated": Way(FiraAdamW, IMMEDIATE, micro_batches=3),
    "immediate": Way(options={**WHOLE, **IMMEDIATE}),
    "immediate, accumulated": Way(options={**WHOLE, **IMMEDIATE}, micro_batches=3),
    "immediate adafactor, accumulated": Way(GaLoreAdafactor, {**WHOLE, **IMMEDIATE}, micro_batches=2),
}
# Of these, ranks do not end as one process, or what they exchange is looked at.
OTHERS = {
    "bases from the first": Way(options={"refresh_from": "first"}, micro_batches=2),
    "accumulated, clipped": Way(micro_batches=2, max_norm=0.1),
    "apollo, clipped": Way(APOLLOAdamW, IMMEDIATE, max_norm=0.1),
}


def train(model, optimizer, rank, world_size, micro_batches, max_norm=None):
    inputs, targets = data()
    norms = []
    if optimizer.mode == "immediate":
        optimizer.clip_to(max_norm)
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


def train_on_rank(name):
    way = {**WAYS, **OTHERS}[name]
    with DDP(use_cpu=True) as strategy:
        model = net()
        optimizer, collectives = way.build(model), Counted(strategy)
        optimizer.bind(collectives)
        norms = train(model, optimizer, strategy.rank, strategy.world_size, way.micro_batches, way.max_norm)
        return weights(model), norms, collectives.elements, optimizer.norm_is_estimated


@pytest.mark.parametrize("name", WAYS)
def test_ranks_end_as_one_process_with_the_union_of_their_batches(name):
    way = WAYS[name]
    alone = net()
    norms = train(alone, way.build(alone), 0, 1, 1, way.max_norm)
    for shared, found, _, is_estimated in (results := run_ranks(train_on_rank, way.world_size, name)):
        assert torch.equal(shared, results[0][0])
        assert (shared - weights(alone)).abs().max() < way.tolerance
        # A norm needs the mean of whole gradients; APOLLO and Fira exchange these for themselves.
        knows = way.kind in (APOLLOAdamW, FiraAdamW) or ("reduction" in way.options and way.micro_batches == 1)
        assert is_estimated != knows
        assert found == pytest.approx(norms, rel=1e-5 if knows else 0.2)
    assert (weights(alone) - weights(net())).abs().max() > 1e-2


def test_each_gradient_is_exchanged_once_in_a_step_and_twice_where_it_is_clipped():
    count = sum(p.numel() for p in net().parameters())
    for name, times in (("apollo", 1), ("apollo, clipped", 2)):
        for _, _, elements, _ in run_ranks(train_on_rank, 2, name):
            assert sum(elements) == STEPS * times * count


def test_bases_from_the_first_micro_batch_leave_ranks_with_the_same_bits():
    alone = net()
    train(alone, Way().build(alone), 0, 1, 1)
    results = run_ranks(train_on_rank, 2, "bases from the first")
    assert torch.equal(results[0][0], results[1][0])
    assert 1e-6 < (results[0][0] - weights(alone)).abs().max() < 0.1  # another run than one big batch, and no wild one


def test_clipping_by_an_estimate_leaves_ranks_with_the_same_bits():
    results = run_ranks(train_on_rank, 2, "accumulated, clipped")
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


def unused_in_the_last_on_rank(uses_before):
    with DDP(use_cpu=True) as strategy:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
        optimizer = FiraAdamW([{"params": list(model.parameters()), "rank": 2}], 1e-2, mode="immediate")
        optimizer.bind(strategy)
        optimizer.clip_to(1.0)
        x = torch.ones(4, 8) * (1 + strategy.rank)
        if uses_before:  # in the first of two micro-batches
            optimizer.backward(model[1](model[0](x)).square().mean(), last=False)
        optimizer.backward(model[0](x).square().mean())
        return weights(model)


def test_a_parameter_without_a_gradient_is_an_error_in_words_also_of_whole_gradients():
    with pytest.raises(RuntimeError, match="1 trainable parameters got no gradient on this rank"):
        run_ranks(unused_in_the_last_on_rank, 2, False)


def test_a_parameter_of_earlier_micro_batches_alone_is_updated_alike_on_all_ranks():
    first, second = run_ranks(unused_in_the_last_on_rank, 2, True)
    assert torch.equal(first, second)
    torch.manual_seed(0)
    before = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    assert not torch.equal(first[64:], weights(before)[64:])


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
