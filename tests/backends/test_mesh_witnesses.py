"""Meshes of three directions against two witnesses in float64: one process, and a loop of plain torch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import SequentialSampler

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.column("mesh")

STEPS, MICRO_BATCHES, ROWS, RATE, LARGEST_NORM = 4, 3, 4, 1e-2, 0.1
EVALUATED = (9, 5)  # rows, and their seed
TOLERANCE = 1e-10  # float32 anywhere would be off by 1e-7
PLAN = {
    "words": "embedding_rowwise",
    "layers.*.qkv.*": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3)), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        normed = self.first(x)
        states = [linear(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in self.qkv]
        mixed = F.scaled_dot_product_attention(*states, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Plain(nn.Module):
    """Causal, of float64: all of it can be divided in each direction."""

    pp_plan = {
        "words": (["input_ids"], ["inputs_embeds"]),
        "layers": (["inputs_embeds"], ["hidden"]),
        "norm": (["hidden"], ["hidden"]),
        "head": (["hidden", "labels"], ["logits"]),
    }

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.head = nn.Embedding(24, 16), nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.double()

    def forward(self, input_ids=None, inputs_embeds=None, labels=None, num_items_in_batch=None):
        hidden = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        if labels is None:
            return {"logits": logits}
        assert logits.dtype == torch.float64
        how = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=how)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset or self.train_dataset)


def rows(number=STEPS * MICRO_BATCHES * ROWS, seed=3):
    """Return rows of seven words, of which every row counts another number as targets, from none to all."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(24, (number, 7), generator=generator)
    labels = torch.randint(24, (number, 7), generator=generator)
    labels = labels.masked_fill(torch.randint(8, (number, 1), generator=generator) > torch.arange(7), -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def by_hand():
    """Train as a page of plain torch does; returns losses, norms, an evaluation and weights."""
    model, given, found = Plain(), rows(), []
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    for step in range(STEPS):
        batch = given[step * MICRO_BATCHES * ROWS : (step + 1) * MICRO_BATCHES * ROWS]
        labels = torch.stack([row["labels"] for row in batch])
        logits = model(torch.stack([row["input_ids"] for row in batch]))["logits"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        assert norm > 2 * LARGEST_NORM  # or nothing would be clipped
        for parameter in model.parameters():
            parameter.grad.mul_(LARGEST_NORM / (norm + 1e-6))
        optimizer.param_groups[0]["lr"] = RATE * (STEPS - step) / STEPS
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.item(), "grad_norm": norm.item()})
    batch = rows(*EVALUATED)
    logits = model(torch.stack([row["input_ids"] for row in batch]))["logits"]
    loss = F.cross_entropy(logits.flatten(0, 1), torch.stack([row["labels"] for row in batch]).flatten())
    found.append({"eval_loss": loss.item()})
    return found, {name: value.detach() for name, value in model.named_parameters()}


def train(folder, options):
    """Run in every rank; returns losses, norms and an evaluation, and the whole weights on rank 0."""
    args = TrainingArguments(
        folder,
        max_steps=STEPS,
        learning_rate=RATE,
        max_grad_norm=LARGEST_NORM,
        gradient_accumulation_steps=MICRO_BATCHES,
        per_device_eval_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        **options,
    )
    trainer = InOrder(Plain(), args, train_dataset=rows(), eval_dataset=rows(*EVALUATED))
    trainer.train()
    history = [{key: entry[key] for key in ("loss", "grad_norm")} for entry in trainer.state.log_history[:STEPS]]
    history.append({"eval_loss": trainer.evaluate()["eval_loss"]})
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    weights = {name: value.clone() for name, value in weights.items()}
    trainer.strategy.close()
    return history, weights


def mesh(world, replicas, sizes):
    """Return how many processes there are, and the arguments by which four samples are a micro-batch on them."""
    options = {"parallelism_config": sizes, "per_device_train_batch_size": ROWS // replicas}
    options |= {"tp_plan": PLAN} if "tp=" in sizes else {}
    sharded = {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 300}}
    return world, options | (sharded if "shard=" in sizes else {})


def assert_equal(found, expected):
    assert len(found[0]) == STEPS + 1
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=0)
    for name, value in found[1].items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected[1][name], rtol=TOLERANCE, atol=TOLERANCE * value.abs().max().item())


@pytest.fixture(scope="module")
def witnesses(tmp_path_factory):
    """Return what one process and the loop by hand give, which are equal."""
    alone = train(str(tmp_path_factory.mktemp("alone")), {"per_device_train_batch_size": ROWS})
    hand = by_hand()
    assert_equal(alone, hand)
    assert alone[1].keys() == hand[1].keys()
    return alone, hand


@pytest.mark.row("numbers")
@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(*mesh(4, 2, "tp=2,dp_shard=2"), id="tp 2, shards 2"),
        pytest.param(*mesh(4, 2, "pp=2,dp_replicate=2"), id="pp 2, replicas 2"),
        pytest.param(*mesh(4, 1, "sp=2,tp=2"), id="sp 2, tp 2", marks=pytest.mark.slow),
        pytest.param(*mesh(4, 1, "cp=2,tp=2"), id="cp 2, tp 2", marks=pytest.mark.slow),
        pytest.param(*mesh(4, 1, "cp=2,tp=2,cp_comm_strategy=alltoall"), id="ring 2, tp 2", marks=pytest.mark.slow),
        pytest.param(*mesh(8, 2, "pp=2,tp=2,dp_shard=2"), id="pp 2, tp 2, shards 2", marks=pytest.mark.slow),
        pytest.param(*mesh(8, 2, "sp=2,tp=2,dp_replicate=2"), id="sp 2, tp 2, replicas 2", marks=pytest.mark.slow),
        pytest.param(
            *mesh(8, 4, "tp=2,dp_shard=2,dp_replicate=2"), id="tp 2, shards 2, replicas 2", marks=pytest.mark.slow
        ),
    ],
)
def test_a_mesh_gives_the_numbers_of_two_witnesses_in_float64(world, options, witnesses, tmp_path):
    found = run_ranks(train, world, str(tmp_path), options, timeout_s=300)
    for witness in witnesses:
        for rank in found:
            assert_equal(rank, witness)
        assert found[0][1].keys() == witness[1].keys()
