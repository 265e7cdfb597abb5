"""`parallelism_config` as it is written for the reference: its losses and norms, as far as it runs on a CPU."""

import importlib.util
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM

import tr_core
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.slow
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
ZERO = {"zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True}
ZERO |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")


def rows():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(3, 60, (24, 8), generator=generator)
    labels = [row.masked_fill(torch.arange(8) < number % 4, -100) for number, row in enumerate(words)]
    places = torch.arange(8)
    given = zip(words, labels, strict=True)
    return [{"input_ids": row, "labels": label, "position_ids": places} for row, label in given]


def train(library, folder, options, plan=None):
    """Return the loss and the norm of each step."""
    args = library.TrainingArguments(
        f"{folder}/{library.__name__}", use_cpu=True, report_to="none", max_steps=4, per_device_train_batch_size=2,
        logging_steps=1, learning_rate=1e-2, optim="adamw_torch", save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa", tp_plan=plan)
    trainer = library.Trainer(model, args, train_dataset=rows())
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(float(step["loss"]), float(step.get("grad_norm") or 0)) for step in steps]


def train_in_rank(name, folder, options, plan, with_deepspeed=False):
    """Train in a rank of which transformers and accelerate know that it is one."""
    meeting = f"file://{os.environ['TR_RENDEZVOUS_FILE']}"
    dist.init_process_group("gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=2)
    if with_deepspeed:
        import deepspeed

        deepspeed.init_distributed("gloo")  # accelerate does so on accelerators alone
    # Without DeepSpeed accelerate takes such sizes on accelerators alone; what it does with them is the same.
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        return train({"transformers": transformers, "tr_core": tr_core}[name], folder, options, plan)


@pytest.fixture
def model_folder(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.column("mesh")
def test_matrices_that_transformers_divided_train_to_the_numbers_of_the_reference(model_folder):
    options = {"parallelism_config": ParallelismConfig(tp_size=2), "gradient_accumulation_steps": 2}
    expected = run_ranks(train_in_rank, 2, "transformers", model_folder, options, "auto", timeout_s=200)
    found = run_ranks(train_in_rank, 2, "tr_core", model_folder, options, "auto", timeout_s=200)
    assert all(norm > 0 for _, norm in expected[0])
    for each in (*expected, *found):
        for step, wanted in zip(each, expected[0], strict=True):
            assert step == pytest.approx(wanted, rel=1e-5)


@needs_deepspeed
@pytest.mark.column("deepspeed")
def test_sequences_in_pieces_train_to_the_losses_of_the_reference(model_folder):
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length=8, sp_attn_implementation="sdpa")
    options = {"parallelism_config": ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)}
    its_own = {**options, "deepspeed": ZERO}
    expected = run_ranks(train_in_rank, 2, "transformers", model_folder, its_own, None, True, timeout_s=200)
    found = run_ranks(train_in_rank, 2, "tr_core", model_folder, options, None, timeout_s=200)
    for each in (*expected, *found):
        for (loss, _), (wanted, _) in zip(each, expected[0], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5)
