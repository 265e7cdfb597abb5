"""Run a whole script of the documentation with its import line changed, a small model and data, and no GPU.

`trl.SFTTrainer` of these scripts is the Trainer that is passed a data set of texts: what it adds, it adds here.
"""

import types

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tr_all import Trainer

WORDS = ("good", "bad", "fine", "dull")


class SFTTrainer(Trainer):
    """A Trainer of causal language models on a column of texts."""

    tokenizer_of_script = None

    def __init__(self, model, args, train_dataset, dataset_text_field, max_seq_length):
        tokenizer = self.tokenizer_of_script
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


def save_small_gemma(folder, hidden_size=32):
    """Save a model of the scripts' family that takes a second to train, with a tokenizer of letters."""
    letters = [chr(number) for number in range(32, 127)]
    tokens = {token: number for number, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GemmaConfig(
        vocab_size=len(tokens),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden_size // 2,
    )
    transformers.GemmaForCausalLM(config).save_pretrained(folder)
    return folder


def run_script(text, folder, monkeypatch, *, changes=(), callbacks=(), resume=None):
    """Run a script, and return the names that it has defined.

    Args:
        text: the script.
        folder: of the model and tokenizer that it is to load; it writes beside it.
        monkeypatch: the fixture.
        changes: further pairs of old and new text.
        callbacks: added to its trainer.
        resume: what its training resumes from.
    """
    texts = {"text": [f"This film was {word} and long." for word in WORDS * 12]}
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict(texts))
    monkeypatch.setattr(SFTTrainer, "tokenizer_of_script", transformers.AutoTokenizer.from_pretrained(folder))
    replaced = [
        (
            "from transformers import TrainingArguments, ",
            "from tr_all import TrainingArguments\nfrom transformers import ",
        ),
        ("import trl\n", ""),
        ('"google/gemma-2b"', repr(str(folder))),
        (".to(0)", ""),
        ("    output_dir=", "    use_cpu=True, disable_tqdm=True, report_to='none',\n    output_dir="),
        ("trainer.train()", "add(trainer)\ntrainer.train(resume_from_checkpoint=resume)"),
        *changes,
    ]
    for old, new in replaced:
        assert old in text, old
        text = text.replace(old, new)

    def add(trainer):
        for callback in callbacks:
            trainer.add_callback(callback)

    names = {"trl": types.SimpleNamespace(SFTTrainer=SFTTrainer), "add": add, "resume": resume}
    torch.manual_seed(0)  # a script that builds a model from its configuration leaves the weights to chance
    exec(compile(text, "script", "exec"), names)
    return names
