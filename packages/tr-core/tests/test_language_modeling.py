"""Batches for language models: the next token, or masked tokens and words."""

import pytest
import torch
from support.data import ToyTokenizer
from support.models import Base
from torch import nn

from tr_core import DataCollatorForLanguageModeling, TrainerCallback
from tr_core.random_state import separate_randomness

# Language modeling: the next token


def next_tokens(tokenizer=None, **options):
    return DataCollatorForLanguageModeling(tokenizer or ToyTokenizer(), mlm=False, **options)


@pytest.mark.parametrize("convert", [list, lambda ids: {"input_ids": ids}])
def test_an_end_of_text_that_also_pads_stays_a_label_where_it_ends_a_text(convert):
    batch = next_tokens(ToyTokenizer(pad_token_id=2))([convert([5, 6, 2]), convert([7, 2])])
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    assert batch["labels"].tolist() == [[5, 6, 2], [7, 2, -100]]


def test_padding_that_samples_bring_is_seen_in_their_attention_mask():
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


def test_random_tokens_are_of_the_whole_vocabulary():
    ids = texts(400)
    batch = masked(ids.tolist(), mlm_probability=1.0, mask_replace_prob=0.0, random_replace_prob=1.0)
    became = batch["input_ids"][batch["labels"] != -100]
    assert became.unique().tolist() == list(range(100))


def test_what_is_chosen_depends_on_the_host_generator_and_the_seed():
    def labels(position, seed):
        with separate_randomness(position):
            return DataCollatorForLanguageModeling(ToyTokenizer(), seed=seed)(rows)["labels"]

    rows = texts(20).tolist()  # as the Trainer loads them
    drawn = {(position, seed): labels(position, seed) for position in (0, 1) for seed in (None, 5, 6)}
    for (position, seed), first in drawn.items():
        assert torch.equal(labels(position, seed), first)
    assert len({tuple(first.flatten().tolist()) for first in drawn.values()}) == 6


def test_a_text_after_a_special_token_begins_a_word_also_where_offsets_begin_at_0_again():
    offsets = [[0, 0], [0, 2], [2, 4], [4, 6], [0, 0], [0, 3], [3, 4], [5, 6], [0, 0]]
    feature = {"input_ids": [1, 10, 11, 12, 2, 13, 14, 15, 2], "offset_mapping": offsets}
    chosen = masked([feature] * 200, whole_word_mask=True, mlm_probability=0.5)["labels"] != -100
    for word in (chosen[:, 1:4], chosen[:, 5:7]):
        assert torch.equal(word.all(-1), word.any(-1))
    assert len({tuple(row) for row in chosen[:, [1, 5, 7]].tolist()}) == 8  # three words, each chosen by itself


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
        ({"mlm_probability": 1.5}, "mlm_probability=1.5 is not a probability"),
        ({"mask_replace_prob": -0.1}, "mask_replace_prob=-0.1 is not a probability"),
        ({"random_replace_prob": 0.5}, "mask_replace_prob=0.8 and random_replace_prob=0.5 are shares of the same"),
        ({"tokenizer": ToyTokenizer(mask_token_id=None)}, "ToyTokenizer has no mask token, which mlm=True needs"),
        ({"mlm": False, "whole_word_mask": True}, "whole_word_mask=True chooses words .* mlm=False masks none"),
    ],
)
def test_masking_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForLanguageModeling(**{"tokenizer": ToyTokenizer(), **options})


def test_whole_words_need_the_positions_of_the_tokens():
    with pytest.raises(ValueError, match="lack; encode them with return_offsets_mapping=True"):
        masked([{"input_ids": [5, 6]}], whole_word_mask=True)


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
def test_masks_are_the_same_with_any_number_of_workers_and_others_in_the_next_epoch(make_trainer, whole_word_mask):
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
