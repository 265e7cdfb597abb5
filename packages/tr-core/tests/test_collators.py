"""Batches for language models, sequences to sequences, and labels of tokens."""

from collections import UserDict

import numpy as np
import pytest
import torch
from small_models import Base
from torch import nn
from toy_tokenizer import ToyTokenizer

import tr_core
from tr_core import TrainerCallback
from tr_core.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
)
from tr_core.random_state import separate_randomness

EVERY = [
    lambda **options: DataCollatorForLanguageModeling(ToyTokenizer(), **options),
    lambda **options: DataCollatorForSeq2Seq(ToyTokenizer(), **options),
    lambda **options: DataCollatorForTokenClassification(ToyTokenizer(), **options),
    lambda **options: DataCollatorWithPadding(ToyTokenizer(), **options),
    DataCollatorWithFlattening,
]


@pytest.mark.parametrize("make", EVERY)
def test_another_kind_of_tensors_than_torch_is_refused(make):
    make(return_tensors="pt")
    with pytest.raises(ValueError, match=r"return_tensors='np', but DataCollator\w+ makes torch tensors"):
        make(return_tensors="np")


def test_the_collators_that_are_named_most_are_exported():
    for name in ("LanguageModeling", "Seq2Seq", "TokenClassification"):
        assert getattr(tr_core, f"DataCollatorFor{name}").__name__ in tr_core.__all__


def test_the_note_of_a_tokenizer_that_padding_is_slow_is_kept_back_while_a_collator_pads():
    class Noting(ToyTokenizer):
        deprecation_warnings = {}
        during = None

        def pad(self, features, **options):
            self.during = dict(self.deprecation_warnings)
            return super().pad(features, **options)

    tokenizer = Noting()
    DataCollatorWithPadding(tokenizer)([{"input_ids": [5]}])
    assert tokenizer.during == {"Asking-to-pad-a-fast-tokenizer": True}
    assert tokenizer.deprecation_warnings == {"Asking-to-pad-a-fast-tokenizer": False}


# Language modeling: the next token


def next_tokens(tokenizer=None, **options):
    return DataCollatorForLanguageModeling(tokenizer or ToyTokenizer(), mlm=False, **options)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("convert", [list, np.array, torch.tensor, lambda ids: {"input_ids": ids}, UserDict])
def test_all_tokens_but_the_padding_are_labels(side, convert):
    rows = [[5, 6, 2], [7, 2]]
    features = [convert({"input_ids": row} if convert is UserDict else row) for row in rows]
    batch = next_tokens(ToyTokenizer(side))(features)
    short, ignored = ([7, 2, 0], [7, 2, -100]) if side == "right" else ([0, 7, 2], [-100, 7, 2])
    assert batch["input_ids"].tolist() == [[5, 6, 2], short]
    assert batch["labels"].tolist() == [[5, 6, 2], ignored]
    assert batch["labels"].dtype == torch.int64


def test_rows_are_padded_to_a_multiple():
    for features in ([[5, 6, 7]], [{"input_ids": [5, 6, 7]}]):
        batch = next_tokens(pad_to_multiple_of=4)(features)
        assert batch["input_ids"].tolist() == [[5, 6, 7, 0]]
        assert batch["labels"].tolist() == [[5, 6, 7, -100]]


@pytest.mark.parametrize("convert", [list, lambda ids: {"input_ids": ids}])
def test_an_end_of_text_that_also_pads_stays_a_label_where_it_ends_a_text(convert):
    batch = next_tokens(ToyTokenizer(pad_token_id=2))([convert([5, 6, 2]), convert([7, 2])])
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    assert batch["labels"].tolist() == [[5, 6, 2], [7, 2, -100]]


def test_padding_that_samples_bring_is_told_by_their_attention_mask():
    feature = {"input_ids": [7, 2, 2], "attention_mask": [1, 1, 0]}
    assert next_tokens(ToyTokenizer(pad_token_id=2))([feature])["labels"].tolist() == [[7, 2, -100]]


def test_samples_of_one_length_need_no_padding_token():
    collate = next_tokens(ToyTokenizer(pad_token_id=None))
    assert collate([[5, 6], [7, 8]])["labels"].tolist() == [[5, 6], [7, 8]]
    with pytest.raises(ValueError, match=r"ToyTokenizer has no pad token; set tokenizer.pad_token"):
        collate([[5, 6], [7]])


def test_labels_that_are_the_inputs_are_replaced_and_others_are_refused():
    collate = next_tokens()
    batch = collate([{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7], "labels": [7]}])
    assert batch["labels"].tolist() == [[5, 6], [7, -100]]
    assert collate([{"input_ids": [5, 0], "labels": [5, -100]}])["labels"].tolist() == [[5, -100]]
    with pytest.raises(ValueError, match="labels other than their input_ids.*DataCollatorForSeq2Seq"):
        collate([{"input_ids": [5, 6], "labels": [-100, 6]}])


# Language modeling: masked tokens


def texts(rows=200, width=50, seed=0):
    ids = torch.randint(10, 100, (rows, width), generator=torch.Generator().manual_seed(seed))
    ids[:, 0], ids[:, -1] = 1, 2
    return ids


def masked(features, **options):
    tokenizer = options.pop("tokenizer", ToyTokenizer())
    with separate_randomness(0):
        return DataCollatorForLanguageModeling(tokenizer, **options)(features)


def test_labels_are_the_chosen_tokens_and_the_rest_of_the_input_is_untouched():
    ids = texts()
    batch = masked(ids.tolist())
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], ids[chosen])
    assert torch.equal(batch["input_ids"][~chosen], ids[~chosen])
    assert not chosen[:, [0, -1]].any()


@pytest.mark.parametrize(
    ("options", "share_chosen", "share_mask", "share_kept"),
    [
        ({}, 0.15, 0.8, 0.1),
        ({"mlm_probability": 0.4, "mask_replace_prob": 0.5, "random_replace_prob": 0.3}, 0.4, 0.5, 0.2),
        ({"mlm_probability": 1.0, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}, 1.0, 1.0, 0.0),
        ({"mask_replace_prob": 0.0, "random_replace_prob": 0.0}, 0.15, 0.0, 1.0),
        ({"mlm_probability": 0.0}, 0.0, None, None),
    ],
)
def test_tokens_are_chosen_and_replaced_with_the_probabilities_given(options, share_chosen, share_mask, share_kept):
    ids = texts(400)
    batch = masked(ids.tolist(), **options)
    inner = torch.ones_like(ids, dtype=torch.bool)
    inner[:, [0, -1]] = False
    chosen = batch["labels"] != -100
    # Bounds of four standard deviations or more: 400 rows of 48 tokens.
    assert float(chosen[inner].float().mean()) == pytest.approx(share_chosen, abs=0.015)
    if share_mask is None:
        return
    became = batch["input_ids"][chosen]
    assert float((became == 3).float().mean()) == pytest.approx(share_mask, abs=0.035)
    # A random token may be the one it replaces, once in a hundred.
    assert float((became == ids[chosen]).float().mean()) == pytest.approx(share_kept, abs=0.035)


def test_random_tokens_are_of_the_whole_vocabulary():
    ids = texts(400)
    batch = masked(ids.tolist(), mlm_probability=1.0, mask_replace_prob=0.0, random_replace_prob=1.0)
    became = batch["input_ids"][batch["labels"] != -100]
    assert became.unique().tolist() == list(range(100))


def test_special_tokens_of_the_samples_are_never_chosen():
    feature = {"input_ids": [5, 6, 7, 8], "special_tokens_mask": [0, 1, 0, 1]}
    batch = masked([feature, {"input_ids": [9], "special_tokens_mask": [0]}], mlm_probability=1.0)
    assert batch["labels"].tolist() == [[5, -100, 7, -100], [9, -100, -100, -100]]
    assert "special_tokens_mask" not in batch


def test_what_is_chosen_depends_on_the_host_generator_and_the_seed():
    def labels(place, seed):
        with separate_randomness(place):
            return DataCollatorForLanguageModeling(ToyTokenizer(), seed=seed)(rows)["labels"]

    rows = texts(20).tolist()  # as the Trainer loads them
    drawn = {(place, seed): labels(place, seed) for place in (0, 1) for seed in (None, 5, 6)}
    for (place, seed), first in drawn.items():
        assert torch.equal(labels(place, seed), first)
    assert len({tuple(first.flatten().tolist()) for first in drawn.values()}) == 6


def test_a_text_after_a_special_token_begins_a_word_also_where_offsets_begin_at_0_again():
    collate = DataCollatorForLanguageModeling(ToyTokenizer(), whole_word_mask=True)
    offsets = [[0, 0], [0, 2], [2, 4], [4, 6], [0, 0], [0, 3], [3, 4], [5, 6], [0, 0]]
    may_be_chosen = torch.tensor([[False, True, True, True, False, True, True, True, False]])
    found = collate._number_words([{"offset_mapping": offsets}], may_be_chosen)
    assert found.tolist() == [[0, 0, 0, 0, 0, 1, 1, 2, 2]]


def test_a_seed_makes_every_collator_choose_the_same_outside_the_trainer():
    rows = texts(20).tolist()

    def three_batches(seed):
        collate = DataCollatorForLanguageModeling(ToyTokenizer(), seed=seed)
        return [collate(rows)["labels"] for _ in range(3)]

    first = three_batches(42)
    torch.manual_seed(99)  # other code draws, too
    assert all(map(torch.equal, first, three_batches(42)))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], three_batches(43)[0])
    before = torch.get_rng_state()
    three_batches(42)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_that_is_changed_acts_from_the_next_batch():
    rows = texts(20).tolist()
    one, other = (DataCollatorForLanguageModeling(ToyTokenizer(), seed=seed) for seed in (1, 2))
    one(rows)
    one.seed = 2
    assert torch.equal(one(rows)["labels"], other(rows)["labels"])


def test_workers_of_a_plain_loader_choose_each_by_its_own_number_and_the_same_again():
    rows = texts(20).tolist()

    def masks():
        collate = DataCollatorForLanguageModeling(ToyTokenizer(), seed=42)
        collate(rows)  # the generator of this process has moved on
        loader = torch.utils.data.DataLoader(rows[:1] * 8, batch_size=2, num_workers=2, collate_fn=collate)
        return [batch["labels"] for batch in loader]

    first = masks()
    assert all(map(torch.equal, first, masks()))
    assert not torch.equal(first[0], first[1])  # of the same rows, by two workers


def words():
    """Return samples of words of three tokens each: a gap of one character stands before each word."""
    ids = [1, *range(10, 40), 2]
    offsets = [(0, 0), *((i + i // 3, i + i // 3 + 1) for i in range(30)), (0, 0)]
    return {"input_ids": ids, "offset_mapping": offsets}


@pytest.mark.parametrize("side", ["right", "left"])
def test_whole_words_are_chosen_together(side):
    short = {name: values[:7] for name, values in words().items()}
    batch = masked([words()] * 300 + [short], tokenizer=ToyTokenizer(side), whole_word_mask=True, mlm_probability=0.3)
    chosen = (batch["labels"] != -100)[:300, 1:31].view(300, 10, 3)
    assert torch.equal(chosen.all(-1), chosen.any(-1))
    assert float(chosen.float().mean()) == pytest.approx(0.3, abs=0.04)
    became = batch["input_ids"][:300, 1:31].reshape(300, 10, 3)[chosen.all(-1)]
    assert float((became == 3).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert "offset_mapping" not in batch


def test_whole_words_of_one_row_do_not_reach_into_another():
    batch = masked([words()] * 50, whole_word_mask=True, mlm_probability=0.5)
    assert (batch["labels"][:, [0, -1]] == -100).all()
    assert len({tuple(row) for row in batch["labels"].tolist()}) > 45


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlm_probability": 1.5}, "mlm_probability=1.5 is no probability"),
        ({"mask_replace_prob": -0.1}, "mask_replace_prob=-0.1 is no probability"),
        ({"random_replace_prob": 0.5}, "mask_replace_prob=0.8 and random_replace_prob=0.5 are shares of the same"),
        ({"tokenizer": ToyTokenizer(mask_token_id=None)}, "ToyTokenizer has no mask token, which mlm=True needs"),
        ({"mlm": False, "whole_word_mask": True}, "whole_word_mask=True chooses words .* mlm=False masks none"),
    ],
)
def test_masking_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForLanguageModeling(**{"tokenizer": ToyTokenizer(), **options})


def test_whole_words_need_the_places_of_the_tokens():
    with pytest.raises(ValueError, match="lack; encode them with return_offsets_mapping=True"):
        masked([{"input_ids": [5, 6]}], whole_word_mask=True)


# Token classification


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["labels", "label"])
@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_labels_of_tokens_are_padded_as_the_tokens_are(side, name, convert):
    collate = DataCollatorForTokenClassification(ToyTokenizer(side), pad_to_multiple_of=2)
    batch = collate([{"input_ids": [5, 6, 7], name: convert([1, 2, 3])}, {"input_ids": [8], name: convert([4])}])
    expected = [[1, 2, 3, -100], [4, -100, -100, -100]]
    if side == "left":
        expected = [[-100, 1, 2, 3], [-100, -100, -100, 4]]
    assert batch["labels"].tolist() == expected
    assert batch["input_ids"].shape == (2, 4)
    assert "label" not in batch


def test_more_labels_than_tokens_are_refused_with_the_sample():
    collate = DataCollatorForTokenClassification(ToyTokenizer())
    with pytest.raises(ValueError, match="more labels than tokens: sample 1 of the batch has 3 values where 2 fit"):
        collate([{"input_ids": [5, 6], "labels": [1, 2]}, {"input_ids": [5], "labels": [1, 2, 3]}])


def test_tokens_without_labels_make_a_batch_without():
    batch = DataCollatorForTokenClassification(ToyTokenizer())([{"input_ids": [5]}])
    assert sorted(batch) == ["attention_mask", "input_ids"]


# Sequences to sequences


@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_are_padded_to_a_length_of_their_own(side):
    features = [{"input_ids": [5, 6, 7], "labels": [1]}, {"input_ids": [8], "labels": torch.tensor([2, 3])}]
    batch = DataCollatorForSeq2Seq(ToyTokenizer(side), label_pad_token_id=-1)(features)
    assert batch["labels"].tolist() == ([[1, -1], [2, 3]] if side == "right" else [[-1, 1], [2, 3]])
    assert batch["input_ids"].shape == (2, 3)
    assert "decoder_input_ids" not in batch


def test_labels_are_padded_to_a_multiple_or_to_the_length_given():
    features = [{"input_ids": [5], "labels": [1, 2, 3]}]
    assert DataCollatorForSeq2Seq(ToyTokenizer(), pad_to_multiple_of=4)(features)["labels"].shape == (1, 4)
    collate = DataCollatorForSeq2Seq(ToyTokenizer(), padding="max_length", max_length=6)
    assert collate(features)["labels"].tolist() == [[1, 2, 3, -100, -100, -100]]
    collate.max_length = 2
    with pytest.raises(ValueError, match="labels longer than max_length=2: sample 0 .* has 3 values where 2 fit"):
        collate(features)


@pytest.mark.parametrize("padding", [False, "do_not_pad"])
def test_labels_are_left_as_they_are_without_padding(padding):
    collate = DataCollatorForSeq2Seq(ToyTokenizer(), padding=padding)
    assert collate([{"input_ids": [5], "labels": [1, 2]}] * 2)["labels"].tolist() == [[1, 2]] * 2
    with pytest.raises(ValueError, match=r"labels of different lengths, \[1, 2\], which make no tensor"):
        collate([{"input_ids": [5], "labels": [1]}, {"input_ids": [5], "labels": [1, 2]}])


def test_the_model_makes_the_inputs_of_its_decoder():
    class Shifting(nn.Module):
        def prepare_decoder_input_ids_from_labels(self, labels):
            return labels.roll(1, dims=1).masked_fill(labels.roll(1, dims=1) == -100, 0)

    batch = DataCollatorForSeq2Seq(ToyTokenizer(), Shifting())([{"input_ids": [5], "labels": [1, 2, 3]}])
    assert batch["decoder_input_ids"].tolist() == [[3, 1, 2]]
    plain = DataCollatorForSeq2Seq(ToyTokenizer(), nn.Linear(1, 1))([{"input_ids": [5], "labels": [1]}])
    assert "decoder_input_ids" not in plain


@pytest.mark.parametrize("features", [[{"input_ids": [5]}], [{"input_ids": [5], "labels": None}]])
def test_samples_without_labels_make_a_batch_without(features):
    batch = DataCollatorForSeq2Seq(ToyTokenizer(), nn.Linear(1, 1))(features)
    assert sorted(batch) == ["attention_mask", "input_ids"]


# Flattening


def test_sequences_are_joined_and_their_first_tokens_are_no_labels():
    batch = DataCollatorWithFlattening()([{"input_ids": [5, 6, 7]}, {"input_ids": torch.tensor([8, 9])}])
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[-100, 6, 7, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
    }


def test_joined_sequences_can_be_described_in_more_ways():
    collate = DataCollatorWithFlattening(
        separator_id=-1, return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=2
    )
    given = torch.tensor([4, 3])
    batch = collate([{"input_ids": [5, 6, 7], "labels": [1, 1, 2]}, {"input_ids": [8, 9], "labels": given}])
    assert batch["labels"].tolist() == [[-1, 1, 2, -1, 3]]
    assert given.tolist() == [4, 3]
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert batch["cu_seq_lens_q"].dtype == batch["seq_idx"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert "position_ids" not in DataCollatorWithFlattening(return_position_ids=False)([{"input_ids": [5]}])


# In training


class LanguageModel(Base):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 8), nn.Linear(8, 100)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class Seen(TrainerCallback):
    """Notes the labels of every batch."""

    def __init__(self):
        self.labels = []

    def on_train_begin(self, args, state, control, model, **kwargs):
        model.register_forward_pre_hook(
            lambda module, given, named: self.labels.append(named["labels"]), with_kwargs=True
        )


@pytest.mark.parametrize("whole_word_mask", [False, True])
def test_masks_are_the_same_with_any_number_of_workers_and_other_in_the_next_pass(make_trainer, whole_word_mask):
    rows = [{**words(), "note": "a", "special_tokens_mask": [1] + [0] * 30 + [1]}] * 12
    seen = []
    for workers in (0, 2):
        torch.manual_seed(0)
        seen.append(Seen())
        make_trainer(
            model=LanguageModel(),
            train_dataset=rows,
            data_collator=DataCollatorForLanguageModeling(ToyTokenizer(), whole_word_mask=whole_word_mask),
            callbacks=[seen[-1]],
            num_train_epochs=2,
            dataloader_num_workers=workers,
        ).train()
    one, other = (torch.stack(noted.labels) for noted in seen)
    assert torch.equal(one, other)
    assert not torch.equal(one[:3], one[3:])


def test_rows_of_unequal_length_without_padding_are_told_what_pads_them():
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [1]}]
    with pytest.raises(ValueError, match="'input_ids' has rows of 1 to 3 values.*processing_class or a data_collator"):
        tr_core.default_data_collator(rows)


@pytest.mark.parametrize("name", ["label", "label_ids", "labels"])
@pytest.mark.parametrize("collate", [DataCollatorWithPadding(ToyTokenizer()), tr_core.default_data_collator])
def test_a_label_that_is_a_word_is_refused_by_its_name(name, collate):
    rows = [{"input_ids": [1], name: "positive"}]
    with pytest.raises(ValueError, match=f"'{name}' is the string 'positive'; a model takes class numbers"):
        collate(rows)


def test_other_words_and_none_are_left_out_of_a_stacked_batch():
    rows = [{"x": 1.0, "text": "a", "nothing": None, "label": 2}]
    assert list(tr_core.default_data_collator(rows)) == ["x", "labels"]
