"""Optimizers whose parameters FSDP2 divides are saved in shards, and go on with another number of processes."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tr_ckpt import Checkpointer
from tr_ckpt.sharded import stateful
from tr_core import Trainer, TrainingArguments
from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_optim import AdaLomo, APOLLOAdamW, FiraAdamW, GaLoreAdamW

SAVED_AT, STEPS, ROWS = 3, 6, 12


def net():
    """Sides that 2, 3 and 4 ranks cannot share evenly, and one row, which only one of them can have."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 1))


def projecting(model, kind=GaLoreAdamW, **options):
    projection = {"rank": 4, "update_proj_gap": 2, "scale": 1.0, "proj_type": options.pop("proj_type")}
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], **projection},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    # A small eps would let the smallest gradients, which are rounding for the most part, make updates as large as all.
    return kind(groups, 3e-3, eps=1e-3, weight_decay=0.1, **{"mode": "deferred", **options})


OPTIMIZERS = {
    "adalomo": lambda model: AdaLomo(model.parameters(), 2e-2, clip_grad_norm=0.5),
    "left": lambda model: projecting(model, proj_type="left"),
    "right": lambda model: projecting(model, proj_type="right"),
    "full": lambda model: projecting(model, proj_type="full"),
    "std in step": lambda model: projecting(model, proj_type="std", mode="step"),
    "lazy": lambda model: projecting(model, proj_type="left", refresh="lazy", refresh_window=1, refresh_cosine=0.2),
    "apollo": lambda model: projecting(model, APOLLOAdamW, proj_type="std", mode="step"),
    "apollo left": lambda model: projecting(model, APOLLOAdamW, proj_type="left", mode="immediate"),
    "fira": lambda model: projecting(model, FiraAdamW, proj_type="std", mode="immediate"),
}


def train(model, optimizer, first, last, rank=0, world_size=1):
    for step in range(first, last):
        batch = torch.randn(ROWS, 10, generator=torch.Generator().manual_seed(step))[rank::world_size]
        optimizer.backward((model(batch) - batch[:, :1]).square().mean())
        if isinstance(optimizer, GaLoreAdamW | APOLLOAdamW | FiraAdamW):
            optimizer.clip_grad_norm(None if optimizer.updates_in_backward else 0.5)
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def build(name, strategy):
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = OPTIMIZERS[name](model)
    if optimizer.fused_in_backward:
        optimizer.bind(strategy)
    return model, optimizer


def checkpointer(folder, strategy):
    return Checkpointer(
        folder, rank=strategy.rank, world_size=strategy.world_size, gather_objects=strategy.gather_objects
    )


def save_and_go_on(folder):
    strategy, found = DDP(), {}
    for name in OPTIMIZERS:
        model, optimizer = build(name, strategy)
        train(model, optimizer, 0, SAVED_AT, strategy.rank, strategy.world_size)
        with_others = checkpointer(f"{folder}/{name}", strategy)
        with_others.save(SAVED_AT, stateful(model, optimizer))
        with_others.close()
        train(model, optimizer, SAVED_AT, STEPS, strategy.rank, strategy.world_size)
        found[name] = weights_of(model)
    strategy.close()
    return found


def restore_and_go_on(folder):
    strategy, found = DDP(), {}
    for name in OPTIMIZERS:
        model, optimizer = build(name, strategy)
        assert checkpointer(f"{folder}/{name}", strategy).restore(stateful(model, optimizer)) == SAVED_AT
        train(model, optimizer, SAVED_AT, STEPS, strategy.rank, strategy.world_size)
        found[name] = weights_of(model)
    strategy.close()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return folder, run_ranks(save_and_go_on, 2, str(folder), timeout_s=200)[0]


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.slow)])
def restored(request, saved):
    return request.param, run_ranks(restore_and_go_on, request.param, str(saved[0]), timeout_s=200)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_go_on_with_another_number_of_processes(saved, restored, name):
    world_size, found = restored
    tolerance = 0 if world_size == 2 else 1e-6
    torch.testing.assert_close(found[name], saved[1][name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_go_on_in_one_process_without_shards(saved, name):
    model = net()
    optimizer = OPTIMIZERS[name](model)
    assert Checkpointer(saved[0] / name).restore(stateful(model, optimizer)) == SAVED_AT
    train(model, optimizer, SAVED_AT, STEPS)
    torch.testing.assert_close(weights_of(model), saved[1][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_row_is_saved_twice(saved, name):
    model = net()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 0, 1)
    whole = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if v.dim())
    shards = sum(file.stat().st_size for file in (saved[0] / name).glob("checkpoint-*/optimizer-shard-*.safetensors"))
    assert whole <= shards < whole + 16_000, "tensors once, and what names them"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x):
        return {"loss": (self.layers(x) - x[:, :1]).square().mean()}


# No eps of Adam's own for the same reason as above.
ADAM = {"adam_epsilon": 1e-3, "optim_target_modules": "all-linear"}
TRAINED = {
    "lomo": {"optim": "lomo", "learning_rate": 0.1},
    "adalomo": {"optim": "adalomo", "max_grad_norm": 0.0},
    "galore_adamw": {"optim": "galore_adamw", "optim_args": "rank=4,update_proj_gap=2", **ADAM},
    "galore_adamw_layerwise": {
        "optim": "galore_adamw_layerwise",
        "optim_args": "rank=4,update_proj_gap=2,proj_type=left",
        "gradient_accumulation_steps": 2,
        **ADAM,
    },
    "galore_adafactor_layerwise": {
        "optim": "galore_adafactor_layerwise",
        "optim_args": "rank=4,update_proj_gap=2",
        "optim_target_modules": "all-linear",
    },
    "apollo_adamw": {"optim": "apollo_adamw", "optim_args": "rank=4,update_proj_gap=2", **ADAM},
    "apollo_mini_layerwise": {"optim": "apollo_mini_layerwise", **ADAM},
    "fira_adamw_layerwise": {
        "optim": "fira_adamw_layerwise",
        "optim_args": "rank=4,update_proj_gap=2,proj_type=left",
        "gradient_accumulation_steps": 2,
        **ADAM,
    },
    "adafactor": {"optim": "adafactor"},
}


def by_trainer(folder, name, resume=False, **options):
    settings = {"learning_rate": 3e-3, "per_device_train_batch_size": 6, **TRAINED[name], **options}
    rows = [{"x": torch.randn(10, generator=torch.Generator().manual_seed(n))} for n in range(48)]
    args = TrainingArguments(
        output_dir=f"{folder}/{name}", max_steps=4, use_cpu=True, disable_tqdm=True, log_level="error", **settings
    )
    trainer = Trainer(Network(), args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-2" if resume else None)
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    found = {key: value.detach().clone() for key, value in weights.items()}
    trainer.strategy.close()
    return found


def by_trainer_in_shards(folder, names, options):
    return {name: by_trainer(folder, name, fsdp="full_shard", **options) for name in names}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    first = {"per_device_train_batch_size": 3, "save_steps": 2}
    return folder, run_ranks(by_trainer_in_shards, 2, str(folder), list(TRAINED), first, timeout_s=300)[0]


@pytest.fixture(scope="module")
def resumed(trained):
    options = {"per_device_train_batch_size": 2, "save_strategy": "no", "resume": True}
    return run_ranks(by_trainer_in_shards, 3, str(trained[0]), list(TRAINED), options, timeout_s=300)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_the_trainer_resumes_shards_with_another_number_of_processes(trained, resumed, name):
    torch.testing.assert_close(resumed[name], trained[1][name], rtol=0, atol=2e-6)
