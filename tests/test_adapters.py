"""LoRA adapters of PEFT: what is trained, what is saved, and what is loaded again."""

import shutil

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tr_all import Trainer, TrainingArguments

# PEFT asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ROWS = torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def base(tmp_path):
    """Return a folder with a small pretrained model whose embedding and head are one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(base):
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


def train(model, folder, resume=None):
    args = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        save_strategy="epoch",
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in ROWS])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


@torch.no_grad()
def logits(model):
    return model.eval()(ROWS).logits


def test_training_changes_the_adapter_and_nothing_else(base, tmp_path):
    model = train(adapted(base), tmp_path / "out").model
    fresh = adapted(base).state_dict()
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, fresh[name])}
    assert changed == {name for name in fresh if ".lora_" in name}
    assert not torch.allclose(logits(model), logits(adapted(base)), atol=1e-3)


def test_the_saved_folder_holds_the_adapter_and_no_other_weights(base, tmp_path):
    model = train(adapted(base), tmp_path / "out").model
    saved = load_file(tmp_path / "out/adapter_model.safetensors")
    trainable = {
        name.replace(".default", ""): weight for name, weight in model.named_parameters() if weight.requires_grad
    }
    assert saved.keys() == trainable.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in trainable.items())
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert {name for name in names if name.endswith(".safetensors")} == {"adapter_model.safetensors"}
    assert "adapter_config.json" in names


def test_the_adapter_loaded_into_the_base_model_gives_the_same_logits(base, tmp_path):
    model = train(adapted(base), tmp_path / "out").model
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "out"))
    assert torch.equal(logits(loaded), logits(model))


def test_from_pretrained_finds_the_base_model_by_the_adapters_folder(base, tmp_path):
    model = train(adapted(base), tmp_path / "out").model
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_a_resumed_run_ends_with_the_same_adapter(base, tmp_path):
    whole = train(adapted(base), tmp_path / "out")
    adapter = load_file(tmp_path / "out/adapter_model.safetensors")
    shutil.rmtree(tmp_path / "out/checkpoint-12")
    resumed = train(adapted(base), tmp_path / "out", resume=True)
    assert resumed.state.global_step == whole.state.global_step == 12
    again = load_file(tmp_path / "out/adapter_model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in adapter.items())
