"""Generate with beams, by sampling and up to a model's last position, for rows that do not divide by the ranks.

A batch of a rank is one that a single process generates for too: its rows go on as long as its longest does.
"""

from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from variants import BACKEND_OF, VARIANTS, chosen

from tr_core import Seq2SeqTrainer, Seq2SeqTrainingArguments
from tr_dist.testing import run_ranks

END, PADDING, IGNORED, LENGTH = 1, 0, -100, 20
ENDLESS = {"sequence_bias": [[[END], -60.0]]}
WAYS = {
    "greedy": {},
    "three beams": {"num_beams": 3},
    "beams that end early": {"num_beams": 2, "early_stopping": True, "length_penalty": 0.5},
    "sampling from one": {"do_sample": True, "top_k": 1},
    "to the end": ENDLESS,
    "beams to the end": {"num_beams": 2, **ENDLESS},
}
# PEFT asks models of transformers by a name that is to go.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
# A model that goes on from its prompts has these ends in other places on each rank.
WAYS_OF = {
    "t5": ("greedy", "three beams", "beams that end early"),
    "bart": ("three beams", "sampling from one"),
    "gpt2": tuple(WAYS),
    "adapter": ("greedy", "to the end"),
    "own": ("greedy",),
}
SIZES = {"vocab_size": 30, "pad_token_id": PADDING, "eos_token_id": END, "bos_token_id": 2}
# How likely rows end, such that they do so at different times.
BIAS = {"t5": 12.0, "bart": 3.5, "gpt2": 5.0, "adapter": 5.0}


def pytest_generate_tests(metafunc):
    names = ("ddp", "full_shard", "units", "zero_3")
    variants = [name for name in chosen(metafunc.config.getoption("--backend", None)) if name in names]
    forms = [pytest.param(VARIANTS[name], marks=pytest.mark.column(BACKEND_OF[name])) for name in variants]
    metafunc.parametrize("ranks", forms, ids=variants, indirect=True, scope="module")


def form_for(name, form):
    """Return the form with the classes that each model names as its layers, where layers are units."""
    settings = form.get("fsdp_config", {})
    if "transformer_layer_cls_to_wrap" not in settings:
        return form
    classes = {"transformer_layer_cls_to_wrap": ["Linear"]} if name == "own" else {}
    others = {key: value for key, value in settings.items() if key != "transformer_layer_cls_to_wrap"}
    return {**form, "fsdp_config": {**others, **classes}}


class Own(torch.nn.Module):
    """Generates by itself, as many tokens as the first token of a batch says."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(30, 16), torch.nn.Linear(16, 30)
        self.config = SimpleNamespace(pad_token_id=PADDING)

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.head(torch.tanh(self.embed(input_ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}

    def generate(self, input_ids, attention_mask, max_length):
        for _ in range(min(int(input_ids[0, -1]) % 11 + 1, max_length - input_ids.shape[1])):
            following = self(input_ids, attention_mask)["logits"][:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, following], dim=1)
        return input_ids


def model_of(name):
    torch.manual_seed(2)
    if name == "own":
        return Own()
    if name == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "initializer_factor": 3.0}
        model = T5ForConditionalGeneration(T5Config(**SIZES, **sizes, decoder_start_token_id=PADDING))
    elif name == "bart":
        halves = {f"{half}_{part}": 2 for half in ("encoder", "decoder") for part in ("layers", "attention_heads")}
        widths = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.8}
        ends = {"decoder_start_token_id": 2, "forced_eos_token_id": None, "max_position_embeddings": LENGTH}
        model = BartForConditionalGeneration(BartConfig(**SIZES, **halves, **widths, **ends))
    else:
        sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.8}
        model = GPT2LMHeadModel(GPT2Config(**SIZES, **sizes))
        if name == "adapter":
            layers = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
            model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **layers))
    model.generation_config.sequence_bias = [[[END], BIAS[name]]]
    return model


def rows(number, longest=9):
    """Return rows whose prompts differ in length: among the ranks' batches either has the longer one at times."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + 5 * i % (longest - 2) for i in range(number)]
    prompts = [torch.randint(3, 30, (length,), generator=generator) for length in lengths]
    return [{"input_ids": prompt, "labels": torch.tensor([2 + i, 5, 6])} for i, prompt in enumerate(prompts)]


class Collate:
    """Pads prompts, before them where the model goes on from them; labels are as long as its logits are."""

    def __init__(self, name):
        self.goes_on = name in ("gpt2", "adapter", "own")

    def __call__(self, batch):
        width = max(len(row["input_ids"]) for row in batch)
        missing = [width - len(row["input_ids"]) for row in batch]
        sides = [(n, 0) if self.goes_on else (0, n) for n in missing]
        pairs = [(row["input_ids"], side) for row, side in zip(batch, sides, strict=True)]
        prompts = torch.stack([torch.nn.functional.pad(prompt, side, value=PADDING) for prompt, side in pairs])
        labels = torch.stack([row["labels"] for row in batch])
        if self.goes_on:
            labels = torch.nn.functional.pad(labels, (width - labels.shape[1], 0), value=IGNORED)
        return {"input_ids": prompts, "attention_mask": (prompts != PADDING).long(), "labels": labels}


def without_padding(tokens):
    return [[int(token) for token in row if token not in (PADDING, IGNORED)] for row in np.asarray(tokens)]


def trainer_of(folder, name, data, options, seen=None):
    def keep(prediction):
        seen.append([without_padding(x) for x in (prediction.predictions, prediction.label_ids, prediction.inputs)])
        return {"rows": len(prediction.predictions)}

    settings = {"optim": "sgd", "learning_rate": 0.0, "max_steps": 1, "lr_scheduler_type": "constant"}
    quiet = {"save_strategy": "no", "disable_tqdm": True, "log_level": "error", "report_to": "none"}
    args = Seq2SeqTrainingArguments(
        output_dir=folder,
        predict_with_generate=True,
        generation_max_length=LENGTH,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        include_for_metrics=["inputs"],
        use_cpu=True,
        **{**settings, **quiet, **form_for(name, options)},
    )
    parts = {"data_collator": Collate(name), "compute_metrics": None if seen is None else keep}
    return Seq2SeqTrainer(model_of(name), args, train_dataset=rows(8), eval_dataset=data, **parts)


def generate(folder, options):
    """Return, by model and way, what metrics are given, and the loss. Training with rate 0 has weights divided."""
    found = {}
    for name, ways in WAYS_OF.items():
        seen = []
        trainer = trainer_of(folder, name, rows(9), options, seen)
        trainer.train()
        losses = [trainer.evaluate(**WAYS[way])["eval_loss"] for way in ways]
        found |= {(name, way): [*seen[i], losses[i]] for i, way in enumerate(ways)}
        trainer.strategy.close()
    return found


def sample(folder, options):
    """Return what is sampled for the same prompt in all rows, by two runs with the same seed."""
    drawn = []
    for _ in range(2):
        trainer = trainer_of(folder, "t5", rows(1) * 8, options)
        trainer.train()
        drawn.append(without_padding(trainer.predict(rows(1) * 8, do_sample=True, **ENDLESS).predictions))
        trainer.strategy.close()
    return drawn


def generate_and_sample(folder, options):
    return generate(folder, options), sample(folder, options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return generate(str(tmp_path_factory.mktemp("alone")), {})


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    return run_ranks(generate_and_sample, 2, folder, request.param, timeout_s=120)


@pytest.mark.row("generation")
def test_metrics_get_each_row_once_in_order_with_what_one_process_generates(alone, ranks):
    data = rows(9)
    for (name, way), (predictions, labels, inputs, _) in alone.items():
        assert labels == [row["labels"].tolist() for row in data]
        assert inputs == [row["input_ids"].tolist() for row in data]
        assert len({len(row) for row in predictions}) > 1 or way.endswith("the end") or name == "bart"
    for found, _ in ranks:
        for case, (*expected, expected_loss) in alone.items():
            *given, loss = found[case]
            for mine, theirs in zip(given, expected, strict=True):
                assert mine == theirs, case
            assert abs(loss - expected_loss) < 1e-5 * expected_loss, case


@pytest.mark.row("generation")
def test_samples_are_those_of_the_seed_and_differ_among_ranks(ranks):
    for _, drawn in ranks:
        assert drawn == ranks[0][1]
        assert drawn[0] == drawn[1]
        assert len({tuple(row) for row in drawn[0]}) == 8
