"""Train a small model of transformers on a mesh, and print what came of it: mesh_on_devices.py FOLDER MESH [cpu].

MESH is a `parallelism_config`, or `alone` or `alone ep` for one process with the model of that mesh.
"""

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_log.phases import active_clock

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Rates(TrainerCallback):
    """Keeps the rates of the last step."""

    rates = {}

    def on_log(self, args, state, control, **kwargs):
        self.rates = dict(active_clock().rates) or self.rates


def model_of(mesh):
    torch.manual_seed(0)
    if "ep" in mesh:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def rows():
    drawn = torch.randint(32, (16, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in drawn]


def main(folder, mesh, *cpu):
    # Experts are shared out over processes that have samples of their own; stages take two micro-batches a step.
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2 if "pp" in mesh else 1}
    sizes = halves if mesh.startswith(("ep", "pp")) else {"per_device_train_batch_size": 4}
    divided = {} if mesh.startswith("alone") else {"parallelism_config": mesh, "fsdp": "full_shard auto_wrap"}
    args = TrainingArguments(
        folder, max_steps=4, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, log_level="error", use_cpu=bool(cpu), bf16="alltoall" in mesh and not cpu, **sizes,
        **divided,
    )  # fmt: skip
    rates = Rates()
    trainer = Trainer(model_of(mesh), args, train_dataset=rows(), callbacks=[rates])
    trainer.train()
    strategy = trainer.strategy
    found = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "device": str(strategy.device),
        "backend": getattr(strategy, "backend", None),
        "mfu": rates.rates.get("mfu"),
    }
    if strategy.rank == 0:
        print(json.dumps(found), flush=True)
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
