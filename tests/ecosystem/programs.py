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
    Trainer,
    TrainerCallback,
    TrainingArguments,
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


def lora(folder):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    words = columns(24, input_ids=lambda n: [4 + (n * 7 + 3 * place) % 22 for place in range(6)])
    data = words.map(lambda row: {"labels": row["input_ids"]})
    args = TrainingArguments(**options(folder, **EVALUATED), gradient_accumulation_steps=2)
    return Trainer(model, args, train_dataset=data, eval_dataset=data.select(range(8)), callbacks=[Reseeded()])


class Heard(TrainerCallback):
    """Records what SetFit's own way to send events hands to callbacks."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name.startswith("on_") and name not in {"on_micro_batch_end", "on_checkpoint"}:  # not of transformers
            return lambda args, state, control, model=None, **more: self.events.append(
                [name, type(args).__module__, type(model).__name__, state.global_step, "st_args" in more]
            )
        return super().__getattribute__(name)


def _setfit(folder, head):
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel(model_body=_sentence_model(folder), model_head=head)
    data = columns(16, text=lambda n: text(n, 4), label=lambda n: n % 2)
    steps = {"max_steps": 4, "logging_steps": 1, "save_steps": 2, **EVALUATED, "eval_max_steps": 1}
    rates = {"body_learning_rate": 1e-2, "head_learning_rate": 1e-2, "num_epochs": (1, 2)}
    args = TrainingArguments(folder, batch_size=4, end_to_end=True, report_to="none", seed=3, **steps, **rates)
    metric, heard = (lambda guessed, labels: {"right": (guessed == torch.tensor(labels)).sum().item()}), Heard()
    parts = {"train_dataset": data, "eval_dataset": data.select(range(8)), "metric": metric}
    trainer = Trainer(model=model, args=args, callbacks=[heard], **parts)
    trainer.heard = heard
    return trainer


def setfit(folder):
    from sklearn.linear_model import LogisticRegression

    return _setfit(folder, LogisticRegression())


def setfit_torch_head(folder):
    from setfit import SetFitHead

    torch.manual_seed(0)
    return _setfit(folder, SetFitHead(in_features=16, out_features=2))


def _run_setfit(trainer, folder):
    """Train both phases: the body, by the Trainer inside, and the classifier."""
    trainer.train()
    trainer.model.save_pretrained(f"{folder}/final")
    inside, head = trainer.st_trainer, trainer.model.model_head
    inside.learned = dict(trainer.model.model_body.state_dict())
    if hasattr(head, "coef_"):
        inside.learned["head"] = torch.tensor(head.coef_)
    else:
        inside.learned.update({f"head.{key}": value for key, value in head.state_dict().items()})
    inside.more = {"events": trainer.heard.events, "evaluated": trainer.evaluate()}
    return inside


def main(build, folder, resume=""):
    """Build a trainer, let it train, and write down what it logged and learned."""
    set_seed(3)
    trainer = build(folder)
    if build.__name__.startswith("setfit"):
        trainer = _run_setfit(trainer, folder)
    else:
        trainer.train(resume_from_checkpoint=resume or None)
        trainer.save_model(f"{folder}/final")
    learned = getattr(trainer, "learned", None) or trainer.model.state_dict()
    weights = {key: value.double().sum().item() for key, value in learned.items()}
    bases = [kind.__module__ for kind in type(trainer).__mro__ if kind.__name__ == "Trainer"]
    result = {"log": trainer.state.log_history, "weights": weights, "base": bases[-1]}
    result["more"] = getattr(trainer, "more", None)
    result["final"] = sorted(os.listdir(f"{folder}/final"))
    Path(folder, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(globals()[sys.argv[1]], *sys.argv[2:])
