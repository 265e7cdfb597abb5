"""Gradients applied in the backward pass over several gloo processes: APOLLO, Fira, and GaLore with whole gradients."""

import pytest
import torch
from shared.projections import STEPS, Counted, Regressor, data, groups, rows, weights
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_optim import APOLLOAdamW, FiraAdamW, GaLoreAdafactor, GaLoreAdamW

KINDS = {
    "apollo": (APOLLOAdamW, {}),
    "fira": (FiraAdamW, {}),
    "galore": (GaLoreAdamW, {"reduction": "whole"}),
    "galore_adafactor": (GaLoreAdafactor, {"reduction": "whole", "relative_step": False}),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 32, bias=False), nn.Tanh(), nn.Linear(32, 8))


def train(name, collectives, rank, world_size, micro_batches, max_norm):
    kind, options = KINDS[name]
    model = net()
    # A seed by which no projection is small by chance, so that rounding is not made large.
    optimizer = kind(groups(model), 1e-2, mode="immediate", weight_decay=0.1, seed=1, **options)
    if collectives is not None:
        optimizer.bind(collectives)
    optimizer.clip_to(max_norm)
    inputs, targets = data()
    norms = []
    for step in range(STEPS):
        xs = inputs[step].chunk(world_size)[rank].chunk(micro_batches)
        ys = targets[step].chunk(world_size)[rank].chunk(micro_batches)
        for k in range(micro_batches):
            loss = (model(xs[k]) - ys[k]).square().mean() / micro_batches
            optimizer.backward(loss, last=k == micro_batches - 1)
        norms.append(optimizer.clip_grad_norm(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), norms


def train_on_rank(*how):
    with DDP(use_cpu=True) as strategy:
        collectives = Counted(strategy)
        return *train(how[0], collectives, strategy.rank, strategy.world_size, *how[1:]), collectives.elements


@pytest.mark.parametrize(
    ("name", "world_size", "micro_batches", "max_norm"),
    [
        ("apollo", 2, 1, None),
        ("apollo", 3, 2, 0.1),
        ("fira", 2, 1, 0.1),
        ("fira", 2, 3, None),
        ("galore", 2, 1, None),
        ("galore", 2, 3, None),
        ("galore_adafactor", 2, 2, None),
    ],
)
def test_ranks_end_as_one_process_with_the_union_of_their_batches(name, world_size, micro_batches, max_norm):
    alone, norms = train(name, None, 0, 1, 1, max_norm)
    results = run_ranks(train_on_rank, world_size, name, micro_batches, max_norm)
    for shared, found, _ in results:
        assert torch.equal(shared, results[0][0])
        assert (shared - alone).abs().max() < 1e-6
        if micro_batches == 1 or not name.startswith("galore"):
            assert found == pytest.approx(norms, rel=1e-5)
    assert (alone - weights(net())).abs().max() > 1e-2


def test_each_gradient_is_exchanged_once_in_a_step_and_twice_where_it_is_clipped():
    count = sum(p.numel() for p in net().parameters())
    for max_norm, times in ((None, 1), (0.1, 2)):
        for _, _, elements in run_ranks(train_on_rank, 2, "apollo", 1, max_norm):
            assert sum(elements) == STEPS * times * count


def unused_on_rank(last_only):
    with DDP(use_cpu=True) as strategy:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
        optimizer = FiraAdamW([{"params": list(model.parameters()), "rank": 2}], 1e-2, mode="immediate")
        optimizer.bind(strategy)
        optimizer.clip_to(1.0)
        x = torch.ones(4, 8) * (1 + strategy.rank)
        if last_only:  # of a step of two micro-batches
            optimizer.backward(model[1](model[0](x)).square().mean(), last=False)
        optimizer.backward(model[0](x).square().mean())
        return weights(model)


def test_a_parameter_without_a_gradient_is_an_error_in_words():
    with pytest.raises(RuntimeError, match="1 trainable parameters got no gradient on this rank"):
        run_ranks(unused_on_rank, 2, False)


def test_a_parameter_of_earlier_micro_batches_alone_is_updated_alike_on_all_ranks():
    first, second = run_ranks(unused_on_rank, 2, True)
    assert torch.equal(first, second)
    torch.manual_seed(0)
    before = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    assert not torch.equal(first[64:], weights(before)[64:])


def trainer_on_rank(folder, options, resume=None):
    args = TrainingArguments(
        output_dir=folder,
        **{
            "optim_target_modules": "mlp",
            "optim_args": "rank=4, update_proj_gap=3, scale=1.0, seed=1",
            "max_steps": 8,
            "learning_rate": 1e-2,
            "max_grad_norm": 0.2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "log_level": "error",
            **options,
        },
    )
    trainer = Trainer(Regressor(net()), args, train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    result = weights(trainer.model), norms
    trainer.strategy.close()
    return result


@pytest.mark.parametrize("name", ["apollo_adamw", "fira_adamw"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_ends_alike_on_one_process_and_on_two(tmp_path, name, accumulation):
    alone, norms = trainer_on_rank(str(tmp_path), {"optim": name, "per_device_train_batch_size": 8})
    for suffix in ("", "_layerwise"):
        options = {
            "optim": name + suffix,
            "per_device_train_batch_size": 4 // accumulation,
            "gradient_accumulation_steps": accumulation,
        }
        results = run_ranks(trainer_on_rank, 2, str(tmp_path), options)
        assert torch.equal(results[0][0], results[1][0])
        assert (results[0][0] - alone).abs().max() < 1e-6
        assert results[0][1] == pytest.approx(norms, rel=1e-4)


def test_a_run_on_ranks_resumes_with_the_same_bits_and_on_another_number_of_ranks(tmp_path):
    options = {"optim": "fira_adamw_layerwise", "per_device_train_batch_size": 4}
    saving = {**options, "save_strategy": "steps", "save_steps": 1}
    whole = run_ranks(trainer_on_rank, 2, str(tmp_path / "whole"), saving)
    for step in (1, 3, 6):
        folder = str(tmp_path / f"whole/checkpoint-{step}")
        resumed = run_ranks(trainer_on_rank, 2, str(tmp_path / "again"), options, folder)
        assert torch.equal(resumed[0][0], whole[0][0])
    alone = {**options, "per_device_train_batch_size": 8}
    resumed, _ = trainer_on_rank(str(tmp_path / "alone"), alone, resume=str(tmp_path / "whole/checkpoint-3"))
    assert (resumed - whole[0][0]).abs().max() < 1e-6
