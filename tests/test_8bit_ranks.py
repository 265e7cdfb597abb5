"""Moments in 8 bits over several gloo processes, as replicas and in shards: the same bits, close to one process."""

import pytest
import torch
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_optim import GaLoreAdamW8bit

STEPS = 7
NAMES = ["adamw_8bit", "galore_adamw_8bit", "galore_adamw_8bit_layerwise"]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 32, bias=False), nn.Linear(32, 8))

    def forward(self, x, labels):
        out = self.mlp(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def weights(model):
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([tensor.detach().flatten() for tensor in whole])


def state_of(optimizer):
    return [value.clone() for state in optimizer.state.values() for _, value in sorted(state.items())]


def rows():
    generator = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(16, generator=generator), "labels": torch.randn(8, generator=generator)}
        for _ in range(8 * STEPS)
    ]


def trainer_on_rank(folder, name, options, resume=None):
    own = {"optim_args": "min_8bit_size=0"}
    if "galore" in name:
        own = {
            "optim_args": "min_8bit_size=0, rank=4, update_proj_gap=3, scale=1.0",
            "optim_target_modules": "all-linear",
        }
    args = TrainingArguments(
        output_dir=folder,
        **{
            "optim": name,
            **own,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )
    trainer = Trainer(Network(), args, train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    result = weights(trainer.model), state_of(trainer.optimizer)
    trainer.strategy.close()
    return result


@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_the_same_bits_and_end_close_to_one_process(tmp_path, name):
    alone, _ = trainer_on_rank(str(tmp_path), name, {"per_device_train_batch_size": 8})
    moved = (alone - weights(Network())).norm()
    for options in (
        {"per_device_train_batch_size": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ):
        first, second = run_ranks(trainer_on_rank, 2, str(tmp_path), name, options)
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
        assert any(value.dtype == torch.int8 for value in first[1])
        assert (first[0] - alone).norm() < 1e-3 * moved


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_with_the_same_bits_and_on_another_number_of_ranks(tmp_path, name):
    options = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 3}
    whole = run_ranks(trainer_on_rank, 2, str(tmp_path / "whole"), name, options)
    folder = str(tmp_path / "whole/checkpoint-3")
    unsaved = {**options, "save_strategy": "no"}
    resumed = run_ranks(trainer_on_rank, 2, str(tmp_path / "again"), name, unsaved, folder)
    assert torch.equal(resumed[0][0], whole[0][0])
    alone, _ = trainer_on_rank(str(tmp_path / "alone"), name, {"per_device_train_batch_size": 8}, folder)
    moved = (whole[0][0] - weights(Network())).norm()
    assert (alone - whole[0][0]).norm() < 1e-3 * moved


@pytest.mark.parametrize("name", NAMES)
def test_shards_resume_with_the_same_bits_and_on_other_numbers_of_ranks(tmp_path, name):
    shards = {"per_device_train_batch_size": 4, "fsdp": "full_shard"}
    saving = {**shards, "save_strategy": "steps", "save_steps": 3}
    whole = run_ranks(trainer_on_rank, 2, str(tmp_path / "whole"), name, saving)[0][0]
    folder = str(tmp_path / "whole/checkpoint-3")
    resumed = run_ranks(trainer_on_rank, 2, str(tmp_path / "again"), name, shards, folder)
    assert torch.equal(resumed[0][0], whole)
    moved = (whole - weights(Network())).norm()
    four = run_ranks(
        trainer_on_rank, 4, str(tmp_path / "4"), name, {**shards, "per_device_train_batch_size": 2}, folder
    )
    alone, _ = trainer_on_rank(str(tmp_path / "1"), name, {"per_device_train_batch_size": 8}, folder)
    for found in (four[0][0], alone):
        assert (found - whole).norm() < 1e-3 * moved


def clipped_on_rank(reduction):
    with DDP(use_cpu=True) as strategy:
        model = Network()
        made = [
            {"params": [p for p in model.parameters() if p.dim() == 2], "rank": 4, "update_proj_gap": 3, "scale": 1.0},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ]
        optimizer = GaLoreAdamW8bit(made, 1e-2, mode="deferred", reduction=reduction, min_8bit_size=0)
        optimizer.bind(strategy)
        for step in range(STEPS):
            for last in (False, True):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(8 * step + 2 * strategy.rank + last))
                optimizer.backward(model(x, torch.zeros(4, 8))["loss"], last=last)
            optimizer.clip_grad_norm(0.1)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model), state_of(optimizer)


@pytest.mark.parametrize("reduction", ["projected", "whole"])
def test_clipping_leaves_ranks_with_the_same_bits(reduction):
    first, second = run_ranks(clipped_on_rank, 2, reduction)
    assert (first[0] - weights(Network())).norm() > 0.1
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
