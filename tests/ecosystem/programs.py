"""Train tiny models with trainers of released libraries, as their documentation shows; print the log as JSON.

Nothing here names this project: `trainer drop-in` runs the same file on our Trainer.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "road", "and", "then", "it", "was", "good", "bad", "very",
         "happy", "sad", "big", "small", "red", "blue"]  # fmt: skip


def tokenizer():
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def llama(kind=LlamaForCausalLM, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return kind(
        LlamaConfig(vocab_size=32, num_key_value_heads=2, max_position_embeddings=64, **sizes, **special, **more)
    )


def saved_llama(folder):
    """A model with a name, from which a library loads a second copy."""
    path = f"{folder}-model"
    llama().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return LlamaForCausalLM.from_pretrained(path)


def saved_bert(folder):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    path = f"{folder}-model"
    BertModel(BertConfig(vocab_size=32, **sizes)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def text(number, length=5):
    return " ".join(WORDS[(number * 7 + 3 * place + place * place) % len(WORDS)] for place in range(length))


def columns(number=16, **makers):
    return Dataset.from_dict({name: [make(row) for row in range(number)] for name, make in makers.items()})


def pairs():
    return columns(
        prompt=lambda n: text(n, 3), chosen=lambda n: " " + text(n + 1, 4), rejected=lambda n: " " + text(n + 2, 3)
    )


def options(folder, **more):
    return {
        "output_dir": folder,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 1e-2,
        "save_steps": 2,
        "seed": 3,
        "disable_tqdm": True,
        **more,
    }


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def sft(folder, **more):
    from trl import SFTConfig, SFTTrainer

    data = columns(24, text=lambda n: text(n, 4 + n % 5))
    args = SFTConfig(**options(folder, **EVALUATED), max_length=16)
    held_out = data.select(range(8))
    return SFTTrainer(llama(), args, train_dataset=data, eval_dataset=held_out, processing_class=tokenizer(), **more)


def sft_lora(folder):
    from peft import LoraConfig

    return sft(folder, peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def dpo(folder):
    from trl import DPOConfig, DPOTrainer

    args, data = DPOConfig(**options(folder, **EVALUATED)), pairs()
    parts = {"train_dataset": data, "eval_dataset": data.select(range(8)), "processing_class": tokenizer()}
    return DPOTrainer(llama(), ref_model=llama(), args=args, **parts)


def reward(folder):
    from trl import RewardConfig, RewardTrainer

    model, args = llama(LlamaForSequenceClassification, num_labels=1), RewardConfig(**options(folder), max_length=16)
    return RewardTrainer(model, args, train_dataset=pairs().remove_columns("prompt"), processing_class=tokenizer())


def kto(folder):
    from trl import KTOConfig, KTOTrainer

    data = columns(prompt=lambda n: text(n, 3), completion=lambda n: " " + text(n + 1, 4), label=lambda n: n % 2 == 0)
    args = KTOConfig(**options(folder))
    return KTOTrainer(llama(), ref_model=llama(), args=args, train_dataset=data, processing_class=tokenizer())


class Reseeded(TrainerCallback):
    """Seeds each step: what is drawn before it by the loading of data differs between two trainers."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)


def _different_words(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]


_GENERATED = {"num_generations": 2, "max_completion_length": 6}


def grpo(folder):
    from trl import GRPOConfig, GRPOTrainer

    args, data = GRPOConfig(**options(folder), **_GENERATED), columns(prompt=lambda n: text(n, 3))
    return GRPOTrainer(llama(), _different_words, args, data, processing_class=tokenizer(), callbacks=[Reseeded()])


def rloo(folder):
    from trl import RLOOConfig, RLOOTrainer

    args, data = RLOOConfig(**options(folder), **_GENERATED), columns(prompt=lambda n: text(n, 3))
    return RLOOTrainer(
        saved_llama(folder), _different_words, args, data, processing_class=tokenizer(), callbacks=[Reseeded()]
    )


def _sentence_model(folder):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    return SentenceTransformer(modules=[Transformer(saved_bert(folder), max_seq_length=16), Pooling(16)])


def sentences(folder):
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    model = _sentence_model(folder)
    data = columns(anchor=lambda n: text(n, 3), positive=lambda n: text(n + 1, 4))
    args = SentenceTransformerTrainingArguments(**options(folder, **EVALUATED))
    parts = {"train_dataset": data, "eval_dataset": data.select(range(8)), "loss": MultipleNegativesRankingLoss(model)}
    return SentenceTransformerTrainer(model, args, **parts)


def sentences_of_two_sets(folder):
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss

    model = _sentence_model(folder)
    ranked = columns(anchor=lambda n: text(n, 3), positive=lambda n: text(n + 1, 4))
    scored = columns(sentence1=lambda n: text(n, 3), sentence2=lambda n: text(n + 1, 4), score=lambda n: n % 5 / 4)
    losses = {"ranked": MultipleNegativesRankingLoss(model), "scored": CosineSimilarityLoss(model)}
    args = SentenceTransformerTrainingArguments(**options(folder))
    return SentenceTransformerTrainer(model, args, train_dataset={"ranked": ranked, "scored": scored}, loss=losses)


def cross_encoder(folder):
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    path = saved_bert(folder)
    set_seed(1)
    model = CrossEncoder(path, num_labels=1, max_length=16)
    data = columns(a=lambda n: text(n, 3), b=lambda n: text(n + 1, 4), label=lambda n: float(n % 2))
    args = CrossEncoderTrainingArguments(**options(folder))
    return CrossEncoderTrainer(model, args, train_dataset=data, loss=BinaryCrossEntropyLoss(model))


def main(name, folder, resume=""):
    set_seed(3)
    trainer = globals()[name](folder)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(f"{folder}/final")
    weights = {key: value.double().sum().item() for key, value in trainer.model.state_dict().items()}
    bases = [kind.__module__ for kind in type(trainer).__mro__ if kind.__name__ == "Trainer"]
    result = {"log": trainer.state.log_history, "weights": weights, "base": bases[-1]}
    result["final"] = sorted(os.listdir(f"{folder}/final"))
    Path(folder, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
