"""Collators: the same samples in, the same batch out; what is drawn at random, with the same frequencies."""

import copy

import numpy as np
import parity_data as data
import parity_models as models
import pytest
import torch
import transformers
from parity_harness import OURS, REFERENCE, Scenario, assert_same, run
from parity_tokenizers import LETTERS, WORDS, piece_tokenizer, word_tokenizer

import tr_core.collators as collators

MASK, PAD = 4, 0


def texts(count=7, tokenizer=None, **encoding):
    """Return encoded texts of different lengths."""
    encode = tokenizer or word_tokenizer()
    numbers = [[(row * 3 + k) % 14 for k in range(2 + row % 5)] for row in range(count)]
    return [dict(encode(" ".join(WORDS[i] for i in row), **encoding)) for row in numbers]


def both(name, features, *given, **options):
    """Return the batches that the two collators of one name make, each of its own copy of the samples."""
    return [
        dict(getattr(source, name)(*copy.deepcopy(given), **options)(copy.deepcopy(features)))
        for source in (transformers, collators)
    ]


def assert_equal(theirs, mine):
    assert set(mine) == set(theirs)
    for name, values in theirs.items():
        if isinstance(values, torch.Tensor):
            assert mine[name].dtype == values.dtype, name
            assert torch.equal(mine[name], values), name
        else:
            assert mine[name] == values, name


CONVERSIONS = [list, np.array, torch.tensor]
SIDES = ["right", "left"]
PADDINGS = [{}, {"pad_to_multiple_of": 8}, {"padding": "max_length", "max_length": 12}, {"padding": "longest"}]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("side", SIDES)
def test_padding(side, padding):
    features = [{**text, "label": number} for number, text in enumerate(texts())]
    assert_equal(*both("DataCollatorWithPadding", features, word_tokenizer(padding_side=side), **padding))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("side", SIDES)
def test_token_classification(side, convert, padding):
    features = [{**text, "labels": convert([1] * len(text["input_ids"]))} for text in texts()]
    assert_equal(*both("DataCollatorForTokenClassification", features, word_tokenizer(padding_side=side), **padding))


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays:UserWarning")  # the reference does
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("convert", [list, np.array])
@pytest.mark.parametrize("side", SIDES)
def test_sequences_to_sequences(side, convert, padding):
    features = [{**text, "labels": convert(text["input_ids"][1:])} for text in texts()]
    given = (word_tokenizer(padding_side=side), models.t5())
    theirs, mine = both("DataCollatorForSeq2Seq", features, *given, **padding)
    assert "decoder_input_ids" in mine
    assert_equal(theirs, mine)


def test_sequences_to_sequences_without_padding():
    features = texts()[:1] * 3
    for feature in features:
        feature["labels"] = [1, 2]
    assert_equal(*both("DataCollatorForSeq2Seq", features, word_tokenizer(), padding=False, label_pad_token_id=-1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_position_ids": False, "separator_id": -1},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True, "position_ids_start": 2},
    ],
)
@pytest.mark.parametrize("convert", [list, torch.tensor])
@pytest.mark.parametrize("labelled", [False, True])
def test_flattening(labelled, convert, options):
    rows = [text["input_ids"] for text in texts()]
    features = [{"input_ids": convert(row), **({"labels": convert(row[::-1])} if labelled else {})} for row in rows]
    assert_equal(*both("DataCollatorWithFlattening", features, **options))


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("convert", [list, np.array, torch.tensor, dict])
@pytest.mark.parametrize("side", SIDES)
def test_the_next_token(side, convert, multiple):
    features = [text if convert is dict else convert(text["input_ids"]) for text in texts()]
    given = (word_tokenizer(padding_side=side),)
    name = "DataCollatorForLanguageModeling"
    assert_equal(*both(name, features, *given, mlm=False, pad_to_multiple_of=multiple))


@pytest.mark.parametrize("encoding", [{}, {"return_special_tokens_mask": True}])
@pytest.mark.parametrize(
    "options",
    [
        {"mlm_probability": 0.0},
        {"mlm_probability": 1.0, "mask_replace_prob": 1.0, "random_replace_prob": 0.0},
        {"mlm_probability": 1.0, "mask_replace_prob": 0.0, "random_replace_prob": 0.0},
    ],
)
@pytest.mark.parametrize("side", SIDES)
def test_masking_where_nothing_is_left_to_chance(side, options, encoding):
    features = texts(**encoding)
    assert_equal(*both("DataCollatorForLanguageModeling", features, word_tokenizer(padding_side=side), **options))


@pytest.mark.parametrize(
    "options",
    [{}, {"mlm_probability": 0.4, "mask_replace_prob": 0.5, "random_replace_prob": 0.3}],
)
def test_masking_has_the_same_frequencies(options):
    ids = torch.randint(5, 19, (600, 40), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    shares = []
    for batch in both("DataCollatorForLanguageModeling", ids.tolist(), word_tokenizer(), **options):
        chosen = batch["labels"] != -100
        became = batch["input_ids"][chosen]
        shares.append([chosen.float().mean(), (became == MASK).float().mean(), (became == ids[chosen]).float().mean()])
    # 24,000 tokens: the difference of two shares has a standard deviation of at most 0.012.
    assert torch.allclose(*map(torch.tensor, shares), atol=0.045)


def word_texts(count=30):
    encode = piece_tokenizer()
    texts_ = [" ".join(LETTERS[(n + k) % 5 : (n + k) % 5 + 1 + (n * k) % 5] for k in range(6)) for n in range(count)]
    encodings = [
        encode(text, return_offsets_mapping=True, return_special_tokens_mask=True, padding="max_length", max_length=26)
        for text in texts_
    ]
    return [dict(encoding) for encoding in encodings], [encoding.word_ids() for encoding in encodings]


def test_whole_words_where_nothing_is_left_to_chance():
    features, _ = word_texts()
    options = {"whole_word_mask": True, "mask_replace_prob": 1.0, "random_replace_prob": 0.0, "mlm_probability": 1.0}
    assert_equal(*both("DataCollatorForLanguageModeling", features, piece_tokenizer(), **options))


def test_whole_words_are_those_of_the_tokenizer_and_chosen_as_often():
    features, word_ids = word_texts()
    options = {"whole_word_mask": True, "mask_replace_prob": 1.0, "random_replace_prob": 0.0, "mlm_probability": 0.3}
    torch.manual_seed(0)
    shares = []
    for batch in both("DataCollatorForLanguageModeling", features * 20, piece_tokenizer(), **options):
        chosen = batch["labels"] != -100
        words = {}
        for row, ids in enumerate(word_ids * 20):
            for column, word in enumerate(ids):
                if word is not None:
                    words.setdefault((row, word), set()).add(bool(chosen[row, column]))
        assert all(len(states) == 1 for states in words.values())
        shares.append(sum(states == {True} for states in words.values()) / len(words))
    assert shares[1] == pytest.approx(shares[0], abs=0.035)


# Runs


def train_both(tmp_path, network, samples, name, *given, **options):
    """Train with each side's own collator and compare everything."""
    outcomes = []
    for side, source in ((REFERENCE, transformers), (OURS, collators)):
        collate = getattr(source, name)(*given, **options)
        scenario = Scenario(network, samples, arguments={"learning_rate": 0.01}, options={"data_collator": collate})
        outcomes.append(run(side, scenario, tmp_path / side.name))
    assert_same(*outcomes)
    return outcomes[1]


def encoded(count=9):
    """Return texts with ids below the 17 that the models know, and a column that no model takes."""
    return [{**row, "input_ids": [number % 17 for number in row["input_ids"]], "text": "x"} for row in texts(count)]


def test_a_run_of_token_classification(tmp_path):
    samples = data.Samples([{**row, "labels": row["input_ids"]} for row in encoded()])
    train_both(tmp_path, models.bert_tagger, samples, "DataCollatorForTokenClassification", word_tokenizer())


def test_a_run_of_sequences_to_sequences(tmp_path):
    samples = data.Samples([{**row, "labels": row["input_ids"][::-1]} for row in encoded()])
    train_both(tmp_path, models.t5, samples, "DataCollatorForSeq2Seq", word_tokenizer(), model=models.t5())


@pytest.mark.parametrize("network", [models.gpt2, models.llama])
def test_a_run_of_a_causal_language_model(tmp_path, network):
    samples = data.Samples(encoded())
    train_both(tmp_path, network, samples, "DataCollatorForLanguageModeling", word_tokenizer(), mlm=False)


def test_a_run_without_padding(tmp_path):
    samples = data.Samples(encoded())
    ours = train_both(tmp_path, models.llama, samples, "DataCollatorWithFlattening")
    # Each sample's loss is what it is alone: without a cache, joined ones do not see each other.
    ours.trainer.model.config.use_cache = False
    metrics = ours.trainer.evaluate(samples)
    ours.trainer.args.per_device_eval_batch_size = 1
    assert ours.trainer.evaluate(samples)["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-5)
