"""The example of translation, with catalogs of a made-up language that is easy to learn."""

import importlib
import json
import random
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from tr_core import Trainer

pytest.importorskip("transformers")
pytest.importorskip("sacrebleu")

FOLDER = Path(__file__).parent.parent / "packages/tr-all/examples/translation"
# A word for a word, in the same order: what a lookup of whole messages cannot do, and a small model learns soon.
ENGLISH = ("open", "close", "save", "delete", "new", "old", "file", "page", "user", "image")
WORDS = dict(zip(ENGLISH, "打关存删新旧文页户图", strict=True))
VERBS, KINDS, THINGS = list(WORDS)[:4], list(WORDS)[4:6], list(WORDS)[6:]
SMALL = (
    "--hidden_size=32",
    "--num_layers=1",
    "--vocab_size=300",
    "--dropout=0",
    "--per_device_train_batch_size=32",
    "--use_cpu",
    "--disable_tqdm",
)


def catalog(messages):
    """Return the bytes of a gettext catalog."""
    count = len(messages)
    texts = [text.encode() for column in zip(*messages.items(), strict=True) for text in column]
    starts = np.cumsum([28 + 16 * count, *map(len, texts[:-1])]).tolist()
    entries = [number for text, start in zip(texts, starts, strict=True) for number in (len(text), start)]
    return struct.pack(f"<{7 + 4 * count}I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0, *entries) + b"".join(texts)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example's `main`, in a folder of its own, with packages that hold all messages of three or four words."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import translation
    from message_pairs import REQUIREMENTS

    phrases = [(v, k, t) for v in VERBS for k in KINDS for t in THINGS]
    phrases += [(v, k, t, u) for v, k, t in phrases for u in THINGS]
    random.Random(0).shuffle(phrases)
    messages = {" ".join(phrase): "".join(WORDS[word] for word in phrase) for phrase in phrases}
    for requirement, folder in REQUIREMENTS["zh"].items():
        name = requirement.partition("==")[0]
        (tmp_path / f"{name.replace('-', '_')}-1.dist-info").mkdir()
        (tmp_path / f"{name.replace('-', '_')}-1.dist-info/METADATA").write_text(f"Name: {name}\nVersion: 1\n")
        target = tmp_path / folder / "locale/zh_CN/LC_MESSAGES"
        target.mkdir(parents=True)
        (target / "x.mo").write_bytes(catalog(messages if folder == "django" else {"": "nothing"}))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return translation


def test_it_learns_to_write_translations_of_messages_that_it_has_not_seen(example, tmp_path, capsys):
    metrics = example.main([*SMALL, "--num_train_epochs=30", "--learning_rate=1e-2"])
    assert metrics["test_chrf"] > max(60, metrics["test_nearest_chrf"] + 10)
    assert metrics["test_exact"] > metrics["test_nearest_exact"] + 0.1
    assert metrics["test_nearest_chrf"] > metrics["test_most_frequent_chrf"]
    assert (
        json.loads((tmp_path / "outputs/translation/all_results.json").read_text())["test_chrf"] == metrics["test_chrf"]
    )
    shown = [line for line in capsys.readouterr().out.splitlines() if "  ->  " in line]
    assert len(shown) == 12
    pairs = example.split(example.read_pairs("zh", 60))
    message = pairs["test"][0].english
    written = write_with_what_was_saved(tmp_path / "outputs/translation", message)
    assert shown[0].startswith(f"{message}  ->  {written}  (")


def write_with_what_was_saved(folder, message):
    """Return the translation of a message by the saved model, loaded as anyone would."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokens = model.generate(**tokenizer(message, return_tensors="pt"), max_length=48)
    return tokenizer.decode(tokens[0], skip_special_tokens=True).strip()


def test_a_run_that_is_resumed_gives_what_one_that_was_not_interrupted_gives(example, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Trainer.logger, "info", lambda text, *given: told.append(text % given))
    words = [*SMALL, "--max_steps", "8", "--save_steps", "4", "--eval_steps", "4", "--save_total_limit", "5"]
    whole = example.main([*words, "--output_dir", "whole"])
    example.main([*words, "--output_dir", "parts"])
    shutil.rmtree(tmp_path / "parts/checkpoint-8")
    resumed = example.main([*words, "--output_dir", "parts", "--resume"])
    assert any("resuming at step 4 of 8" in line for line in told)
    for name in ("test_loss", "test_chrf", "test_exact"):
        assert resumed[name] == whole[name], name


def test_without_generating_there_is_nothing_to_measure(example):
    with pytest.raises(SystemExit, match=r"measures what the model writes; leave predict_with_generate=True"):
        example.main([*SMALL, "--no_predict_with_generate"])


def test_without_sacrebleu_it_says_what_to_install(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    monkeypatch.delitem(sys.modules, "translation")
    with pytest.raises(SystemExit, match=r"is missing; run: python -m pip install sacrebleu"):
        importlib.import_module("translation")


def test_chrf_counts_over_all_texts_together(example):
    translations = ["the cat", "一个 猫", "x", "long enough to have all n-grams"]
    references = ["the bat sat", "一只猫在这里", "xyz abc", "long enough for all the n-grams"]
    assert example.chrf(translations, references) == pytest.approx(41.912836591783766)
    assert example.chrf(["保存文件", "a b"], ["保存文件", "ab"]) == 100


def test_a_text_that_the_tokenizer_was_not_made_from_comes_back_whole(example):
    from small_translator import train_tokenizer

    tokenizer = train_tokenizer(["save 保存"], 300)
    texts = ["Ünicode, 文件 and  two spaces", "저장", "حفظ"]
    tokens = np.array([row + [-100] * (64 - len(row)) for row in tokenizer(texts)["input_ids"]])
    assert example.decode(tokens, tokenizer) == texts


def test_help_tells_of_the_examples_options_and_of_the_training_arguments(example, capsys):
    with pytest.raises(SystemExit) as stop:
        example.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("--language", "zh|ko|ar", "--resume", "--predict_with_generate", "--learning_rate"):
        assert word in text
