"""Train with DeepSpeed a layer that has no part in some micro-batches: its gradient is that of this step alone."""

import importlib.util
import os

import pytest
import torch
from test_numbers import Network, Rows

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

pytestmark = [
    pytest.mark.column("deepspeed"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

DIVIDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
HOST = {"device": "cpu"}
STAGES = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2 offload": {"stage": 2, "offload_optimizer": HOST},
    "3": DIVIDED,
    "3 offload": {**DIVIDED, "offload_optimizer": HOST, "offload_param": HOST},
}


class Branching(Network):
    """Of every three steps of two micro-batches, uses a layer in none, the second, and the first."""

    def __init__(self):
        super().__init__()
        self.aside = torch.nn.Linear(8, 3)
        self.forwards = 0

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        self.forwards += 1
        if self.forwards % 6 in (4, 5):
            outputs["loss"] = outputs["loss"] + self.aside(x).square().mean()
        return outputs


def train(folder, deepspeed):
    """Run in every rank; return losses and norms of six steps, and the whole weights on rank 0."""
    rows = [dict(row, labels=row["labels"].clamp(min=0)) for row in Rows(24).rows]
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=2,
        max_steps=6,
        optim="sgd",  # to which no gradient and a gradient of zeros are the same
        learning_rate=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        deepspeed=deepspeed,
    )
    trainer = Trainer(Branching(), args, train_dataset=rows)
    trainer.train()
    logged = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.clone() for name, value in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    trainer.strategy.close()
    return logged, weights


@pytest.mark.parametrize("zero", STAGES.values(), ids=STAGES)
def test_a_layer_without_a_part_in_a_micro_batch_has_no_gradient_of_an_earlier_step(tmp_path, zero):
    alone = train(str(tmp_path / "alone"), None)
    [ours, _] = run_ranks(train, 2, str(tmp_path / "out"), {"zero_optimization": zero}, timeout_s=120)
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(alone[0]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1], alone[1], rtol=1e-5, atol=1e-6)
