"""Train an adapter of peft, also on divided models: its file is that of one process, and a run goes on from it."""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from variants import run_on, shared

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # said by peft's own
]

UNITS = {"transformer_layer_cls_to_wrap": ["BertLayer"], "use_orig_params": True}
OF_BERT = {
    **{f"bert.encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}
FULL = {"state_dict_type": "FULL_STATE_DICT"}
TOLERANCE = 1e-5  # sums of 32 bits in another order, over six steps of Adam


def base():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=2, **sizes, **no_dropout)
    return BertForSequenceClassification(config)


def adapted():
    from peft import LoraConfig, get_peft_model

    model = base()
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"]))


def train(folder, options, batch_size, max_steps, resume):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (32, 8), generator=generator)
    beside = options.pop("beside", False)  # a bias that is trained beside the adapter
    args = TrainingArguments(
        output_dir=folder,
        max_steps=max_steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=3,
        disable_tqdm=True,
        log_level="error",
        **{"use_cpu": True, **options, "per_device_train_batch_size": batch_size},
    )
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
    model = adapted()
    model.get_base_model().bert.pooler.dense.bias.requires_grad_(beside)
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/out")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.strategy.close()
    return losses


@pytest.mark.row("adapter")
def test_an_adapter_is_trained_saved_and_gone_on_with_as_in_one_process(variant, tmp_path):
    options = shared(variant, 4, 2)
    if "transformer_layer_cls_to_wrap" in options.get("fsdp_config", {}):
        options["fsdp_config"] = UNITS
    if "tp_plan" in options:
        options["tp_plan"] = OF_BERT
    size = options.pop("per_device_train_batch_size")
    alone = train(str(tmp_path / "1"), {}, 4, 6, None)
    run_on(variant, train, 2, str(tmp_path / "2"), options, size, 3, None, timeout_s=240)
    for losses in run_on(variant, train, 2, str(tmp_path / "2"), options, size, 6, True, timeout_s=240):
        assert losses == pytest.approx(alone, abs=TOLERANCE)
    saved, expected = (load_file(tmp_path / place / "out" / "adapter_model.safetensors") for place in ("2", "1"))
    assert not (tmp_path / "2" / "out" / "model.safetensors").exists()
    assert len(expected) == 10  # two matrices for each of two projections in two layers, and the head
    torch.testing.assert_close(saved, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert sum(value.abs().sum() for key, value in saved.items() if "lora_B" in key) > 0


@pytest.mark.column("fsdp")
@pytest.mark.row("adapter")
@pytest.mark.parametrize("beside", [False, True])
def test_full_checkpoints_of_an_adapter_and_its_head_resume_with_the_same_bits_and_load_in_peft(beside, tmp_path):
    from peft import PeftModel, get_peft_model_state_dict

    whole = {"fsdp": "full_shard", "fsdp_config": FULL}
    folder, out = tmp_path / "run", tmp_path / "run" / "out"
    arguments = (str(folder), {"beside": beside, **whole}, 2, 6)
    losses = run_ranks(train, 2, *arguments, None, timeout_s=120)[0]
    expected = load_file(out / "adapter_model.safetensors")
    shutil.rmtree(out)
    shutil.rmtree(folder / "checkpoint-6")
    assert run_ranks(train, 2, *arguments, True, timeout_s=120)[0] == losses
    for place in (out, folder / "checkpoint-6"):
        saved = load_file(place / "adapter_model.safetensors")
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in expected)
        loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base(), str(place)))
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert any("classifier" in name for name in expected)
    names = json.loads((folder / "checkpoint-6" / "unfrozen.json").read_text())
    assert ("pooler" in str(names)) is beside


@pytest.mark.column("fsdp")
@pytest.mark.row("adapter")
def test_a_full_checkpoint_of_an_adapter_is_resumed_in_shards(tmp_path):
    whole, sharded = ({"beside": True, "fsdp": "full_shard", "fsdp_config": kind} for kind in (FULL, {}))
    losses = run_ranks(train, 2, str(tmp_path), whole, 2, 6, None, timeout_s=120)
    shutil.rmtree(tmp_path / "checkpoint-6")
    assert run_ranks(train, 2, str(tmp_path), sharded, 2, 6, True, timeout_s=120) == losses
