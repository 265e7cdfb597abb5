"""Tiny models, tokenizers and data as files, for scripts that read theirs from disk."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    BertConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
    ViTConfig,
    ViTMAEConfig,
    XLNetConfig,
    XLNetTokenizer,
)

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "road", "and", "then", "it", "was", "good", "bad", "very",
         "happy", "sad", "big", "small", "red", "blue"]  # fmt: skip
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "[CLS]", "sep_token": "[SEP]",
           "mask_token": "[MASK]", "bos_token": "<s>", "eos_token": "</s>"}  # fmt: skip
ROWS = 24
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = 32
# Dropout is a known difference, which would hide others.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def text(number, length=6):
    return " ".join(WORDS[(number * 7 + 3 * place + place * place) % len(WORDS)] for place in range(length))


def save_tokenizer(folder):
    tokens = [*SPECIAL.values(), *WORDS, ".", ":", "?"]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(tokens)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, tokens.index(token)) for token in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, **SPECIAL).save_pretrained(folder)
    return len(tokens)


def save_models(root):
    """Save one model of each kind below `root`, with a tokenizer or an image processor beside it."""
    size = save_tokenizer(root / "tokenizer")
    special = {"pad_token_id": 0, "bos_token_id": 5, "eos_token_id": 6}
    images = {"image_size": IMAGE, "patch_size": 8, **SIZES, **NO_DROPOUT}
    configurations = {
        "bert": BertConfig(vocab_size=size, max_position_embeddings=64, **SIZES, **NO_DROPOUT),
        "llama": LlamaConfig(vocab_size=size, num_key_value_heads=2, max_position_embeddings=64, **SIZES, **special),
        "t5": T5Config(vocab_size=size, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
                       pad_token_id=0, eos_token_id=6, decoder_start_token_id=0),
        "xlnet": XLNetConfig(vocab_size=64, d_model=16, n_layer=2, n_head=2, d_inner=32, dropout=0.0,
                             summary_last_dropout=0.0, pad_token_id=4, start_n_top=3, end_n_top=3),
        "vit": ViTConfig(encoder_stride=8, **images),
        "vit_mae": ViTMAEConfig(decoder_hidden_size=16, decoder_intermediate_size=32, decoder_num_hidden_layers=1,
                                decoder_num_attention_heads=2, mask_ratio=0.5, **images),
    }  # fmt: skip
    for name, configuration in configurations.items():
        if name.startswith("vit") and not find_spec("torchvision"):
            continue
        torch.manual_seed(0)
        AutoModel.from_config(configuration).save_pretrained(root / name)
        if name.startswith("vit"):
            from transformers import ViTImageProcessor  # needs torchvision

            side = {"height": IMAGE, "width": IMAGE}
            ViTImageProcessor(size=side).save_pretrained(root / name)
        elif name == "xlnet":
            tokens = ["<unk>", "<s>", "</s>", "<sep>", "<pad>", "<cls>", "<mask>", "<eop>", "<eod>", ".", "?", "\u2581"]
            vocabulary = [*tokens, *(f"\u2581{word}" for word in WORDS)]
            XLNetTokenizer(vocab=[(token, -1.0) for token in vocabulary]).save_pretrained(root / name)
        else:
            save_tokenizer(root / name)


def save_data(root):
    """Save data of each kind below `root`; the rows of an evaluation are fewer."""
    for part, count in (("train", ROWS), ("validation", ROWS // 3)):
        _save_tables(root, part, count)
        if find_spec("PIL"):
            _save_images(root / "images" / part, count)
    (root / "xnli").mkdir()
    for part in ("train", "validation", "test"):
        rows = [{"premise": text(n), "hypothesis": text(n + 1, 4), "label": n % 3} for n in range(ROWS)]
        _save_lines(root / "xnli" / f"{part}.jsonl", rows)
    names = "\n".join(f"          '{number}': {name}" for number, name in enumerate(("fits", "open", "fails")))
    files = "\n".join(f"  - split: {part}\n    path: {part}.jsonl" for part in ("train", "validation", "test"))
    features = f"dataset_info:\n- config_name: en\n  features:\n{_feature('premise')}{_feature('hypothesis')}"
    label = f"  - name: label\n    dtype:\n      class_label:\n        names:\n{names}\n"
    card = f"---\n{features}{label}configs:\n- config_name: en\n  data_files:\n{files}\n---\n"
    (root / "xnli" / "README.md").write_text(card)


def _feature(name):
    return f"  - name: {name}\n    dtype: string\n"


def _save_tables(root, part, count):
    numbers = range(count)
    tables = {
        "pairs": [{"sentence1": text(n), "sentence2": text(n + 1, 4), "label": n % 2} for n in numbers],
        "classes": [{"sentence": text(n, 4 + n % 4), "label": WORDS[n % 3]} for n in numbers],
        "several": [{"sentence": text(n), "label": WORDS[n % 3 : n % 3 + 1 + n % 2]} for n in numbers],
        "scores": [{"sentence": text(n), "label": n % 7 / 3} for n in numbers],
        "tags": [{"tokens": text(n).split(), "ner_tags": ["B-A" if n % 2 else "O"] + ["O"] * 5} for n in numbers],
        "translations": [{"translation": {"en": text(n), "de": text(n + 2, 5)}} for n in numbers],
        "summaries": [{"text": text(n, 12), "summary": text(n + 1, 3)} for n in numbers],
        "endings": [_with_endings(n) for n in numbers],
    }
    for name, rows in tables.items():
        _save_lines(root / f"{name}.{part}.json", rows)
    (root / f"questions.{part}.json").write_text(json.dumps({"data": [_question(n) for n in numbers]}))
    (root / f"plain.{part}.txt").write_text("".join(f"{text(n, 20)}.\n" for n in range(4 * count)))
    csv = "".join(f"{text(n)},{text(n + 1, 4)},{n % 2}\n" for n in numbers)
    (root / f"pairs.{part}.csv").write_text("sentence1,sentence2,label\n" + csv)


def _with_endings(number):
    endings = {f"ending{place}": text(number + place, 3) for place in range(4)}
    return {"sent1": text(number), "sent2": text(number + 1, 2), **endings, "label": number % 4}


def _question(number):
    context = text(number, 12)
    answer = context.split()[3]
    answers = {"text": [answer], "answer_start": [context.index(answer)]}
    return {"id": str(number), "title": "", "context": context, "question": text(number, 3), "answers": answers}


def _save_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _save_images(folder, count):
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        into = Path(folder, WORDS[number % 2])
        into.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (IMAGE, IMAGE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(into / f"{number}.png")
