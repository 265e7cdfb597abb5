"""The documented settings of GaLore on small models of transformers."""

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, GPT2Config, GPT2LMHeadModel

from tr_core import Trainer, TrainingArguments


def gemma():
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
    )
    return GemmaForCausalLM(config)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))


def rows(number=32):
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(64, (12,), generator=generator) for _ in range(number)]
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(folder, model, **options):
    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "optim": "galore_adamw",
        "optim_target_modules": [r".*.attn.*", r".*.mlp.*"],
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "logging_steps": 1,
        **options,
    }
    args = TrainingArguments(output_dir=str(folder), **options)
    trainer = Trainer(model=model, args=args, train_dataset=rows())
    trainer.train()
    return trainer


def ranks(trainer):
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return {
        names[id(p)]: next(v.shape[-1] for key, v in state.items() if key.startswith("basis"))
        for p, state in trainer.optimizer.state.items()
        if any(key.startswith("basis") for key in state)
    }


@pytest.mark.parametrize("name", ["galore_adamw", "galore_adamw_layerwise", "galore_adafactor"])
def test_the_documented_regular_expressions_find_attention_and_feed_forward_layers(tmp_path, name):
    trainer = train(tmp_path, gemma(), optim=name)
    found = ranks(trainer)
    assert len(found) == 2 * 7
    assert all(".self_attn." in path or ".mlp." in path for path in found)
    assert set(found.values()) <= {16, 32}  # the shorter sides: 128, the default, is more than these have


def test_the_documented_options_are_honoured(tmp_path):
    trainer = train(tmp_path, gemma(), optim_args="rank=8, update_proj_gap=100, scale=0.10")
    assert set(ranks(trainer).values()) == {8}
    group = trainer.optimizer.param_groups[0]
    assert (group["rank"], group["update_proj_gap"], group["scale"], group["proj_type"]) == (8, 100, 0.10, "std")


@pytest.mark.parametrize("targets", [["attn", "mlp"], "all-linear", r".*\.(attn|mlp)\..*", "model.layers.0.mlp"])
def test_targets_may_be_names_an_expression_a_path_or_all(tmp_path, targets):
    model = gemma()
    if targets == r".*\.(attn|mlp)\..*":
        model = gpt2()
    found = ranks(train(tmp_path, model, optim_target_modules=targets, max_steps=1))
    expected = {"all-linear": 15, "model.layers.0.mlp": 3, r".*\.(attn|mlp)\..*": 8}.get(str(targets), 14)
    assert len(found) == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_layerwise_goes_with_accumulation_clipping_and_activation_checkpointing(tmp_path, reentrant):
    usual = train(tmp_path, gemma(), optim_args="rank=8", per_device_train_batch_size=4, max_grad_norm=0)
    layerwise = train(
        tmp_path,
        gemma(),
        optim="galore_adamw_layerwise",
        optim_args="rank=8",
        gradient_accumulation_steps=2,
        max_grad_norm=0,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    for (name, one), other in zip(usual.model.named_parameters(), layerwise.model.parameters(), strict=True):
        assert (one - other).abs().max() < 2e-5, name
    assert layerwise.state.log_history[-2]["loss"] < layerwise.state.log_history[0]["loss"]
