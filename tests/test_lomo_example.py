"""Run the documentation's AdaLomo example with its import line changed, a small model, and no GPU.

`trl.SFTTrainer` is the Trainer that is passed a data set of texts: what it adds, it adds here.
"""

import re
import types
from pathlib import Path

import pytest
import torch

from tr_all import Trainer

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

# Published in Korean and Arabic; the latter's is the same but for its commas and 100 steps.
EXAMPLE = """
import torch
import datasets
from transformers import TrainingArguments, AutoTokenizer, AutoModelForCausalLM
import trl

train_dataset = datasets.load_dataset('imdb', split='train')

args = TrainingArguments(
    output_dir="./test-lomo",
    max_steps=1000,
    per_device_train_batch_size=4,
    optim="adalomo",
    gradient_checkpointing=True,
    logging_strategy="steps",
    logging_steps=1,
    learning_rate=2e-6,
    save_strategy="no",
    run_name="lomo-imdb",
)

model_id = "google/gemma-2b"

tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, low_cpu_mem_usage=True).to(0)

trainer = trl.SFTTrainer(
    model=model, 
    args=args,
    train_dataset=train_dataset,
    dataset_text_field='text',
    max_seq_length=1024,
)

trainer.train()
"""  # noqa: W291
STEPS = 12


class SFTTrainer(Trainer):
    """A Trainer of causal language models on a column of texts."""

    tokenizer_of_example = None

    def __init__(self, model, args, train_dataset, dataset_text_field, max_seq_length):
        tokenizer = self.tokenizer_of_example
        rows = train_dataset.map(
            lambda row: tokenizer(row[dataset_text_field], truncation=True, max_length=max_seq_length),
            remove_columns=train_dataset.column_names,
        )
        super().__init__(
            model=model,
            args=args,
            train_dataset=rows,
            data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )


@pytest.fixture
def small_gemma(tmp_path):
    """Save a model of the example's family that takes a second to train, with a tokenizer of letters."""
    letters = [chr(number) for number in range(32, 127)]
    tokens = {token: number for number, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *letters])}
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "gemma")
    torch.manual_seed(0)
    config = transformers.GemmaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    transformers.GemmaForCausalLM(config).save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


def run_example(text, folder, monkeypatch):
    texts = {"text": [f"This film was {word} and long." for word in ("good", "bad", "fine", "dull") * 12]}
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict(texts))
    monkeypatch.setattr(
        SFTTrainer, "tokenizer_of_example", transformers.AutoTokenizer.from_pretrained(folder), raising=True
    )
    changed = text.replace(
        "from transformers import TrainingArguments, AutoTokenizer",
        "from tr_all import TrainingArguments\nfrom transformers import AutoTokenizer",
    )
    for old, new in (
        ("import trl\n", ""),
        ('"google/gemma-2b"', repr(str(folder))),
        (".to(0)", ""),
        ("max_steps=1000", f"max_steps={STEPS}, use_cpu=True, disable_tqdm=True, report_to='none'"),
    ):
        assert old in changed
        changed = changed.replace(old, new)
    names = {"trl": types.SimpleNamespace(SFTTrainer=SFTTrainer)}
    exec(compile(changed, "example", "exec"), names)
    return names


def test_the_adalomo_example_runs_with_activation_checkpointing(small_gemma, monkeypatch):
    names = run_example(EXAMPLE, small_gemma, monkeypatch)
    trainer = names["trainer"]
    assert type(trainer.optimizer).__name__ == "AdaLomo"
    assert trainer.state.global_step == STEPS
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in history] == list(range(1, STEPS + 1))
    assert history[0]["learning_rate"] == pytest.approx(2e-6)
    assert history[-1]["learning_rate"] == pytest.approx(2e-6 / STEPS)
    assert all(entry["grad_norm"] > 0 for entry in history)
    assert not list(Path("test-lomo").glob("checkpoint-*"))


def test_with_a_rate_for_a_new_model_it_learns(small_gemma, monkeypatch):
    text = EXAMPLE.replace("learning_rate=2e-6", "learning_rate=5e-2")
    for optim in ("adalomo", "lomo"):
        changed = re.sub('optim="adalomo"', f'optim="{optim}", max_grad_norm=1.0', text)
        trainer = run_example(changed, small_gemma, monkeypatch)["trainer"]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < losses[0] - 0.2, (optim, losses)
