"""A rank whose batch has no labels, where others have: every rank makes every exchange, and all say what is wrong."""

import pytest
import torch
from shared.data import rows
from torch import nn

from tr_core import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from tr_dist.testing import run_ranks

COMMON = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "num_train_epochs": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "log_level": "error",
    "use_cpu": True,
    "ddp_timeout": 30,
    "strategy": "ddp",
}


class Network(nn.Module):
    """Has a loss with labels, divided by the count, and another one without."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 3)

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.layer(x)
        if labels is None:
            return {"loss": logits.square().mean(), "logits": logits}
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": loss / (len(labels) if num_items_in_batch is None else num_items_in_batch), "logits": logits}

    def generate(self, x, **options):
        return self.layer(x).argmax(1, keepdim=True)


class MayDiffer(Network):
    """Gives an output more for rows that are marked."""

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        return outputs | {"more": outputs["logits"]} if x[0, 0] == 7 else outputs


class Takes(Trainer):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return super().get_batch_samples(epoch_iterator, num_batches, device)


KINDS = {kind.__name__: kind for kind in (Trainer, Takes)}


def data(number, *without):
    """Return rows of which some have no labels."""
    return [{"x": row["x"]} if place in without else row for place, row in enumerate(rows(number))]


def outcome(trainer, act):
    """Return what a method of a Trainer returns, or the text of its error."""
    try:
        result = act(trainer)
    except ValueError as error:
        result = str(error)
    trainer.strategy.close(failed=isinstance(result, str))
    return result


def train(folder, kind, without, options):
    args = TrainingArguments(folder, **COMMON, train_sampling_strategy="sequential", logging_steps=1, **options)
    trainer = KINDS[kind](Network(), args, train_dataset=data(16, *without))
    return outcome(trainer, lambda each: [e["loss"] for e in each.train() and each.state.log_history if "loss" in e])


@pytest.mark.parametrize(
    ("kind", "options", "rank"),
    [("Trainer", {}, 0), ("Takes", {}, 1), ("Trainer", {"auto_find_batch_size": True}, 1)],
)
def test_a_step_in_which_a_rank_has_no_labels_to_count_is_refused_on_all(kind, options, rank, tmp_path):
    first = 0 if options else 4  # the second step, or before the first one
    without = (first + 2 * rank, first + 2 * rank + 1)
    for text in run_ranks(train, 2, str(tmp_path), kind, without, options, timeout_s=120):
        assert text.startswith(f"rank {rank} of 2 has a batch without labels in a step in which other ranks have")


def test_steps_in_which_no_rank_has_labels_are_those_of_one_process(tmp_path):
    first, second = run_ranks(train, 2, str(tmp_path), "Trainer", range(4, 8), {}, timeout_s=120)
    assert first == second
    alone = train(str(tmp_path), "Trainer", range(4, 8), {"gradient_accumulation_steps": 2})
    assert first == pytest.approx(alone, rel=1e-6)


class Language(nn.Module):
    """Predicts the next word, and says as a model of transformers does that it leaves out labels of -100."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def loss_function(self, logits, labels, num_items_in_batch=None):
        how = {"ignore_index": -100, "reduction": "mean" if num_items_in_batch is None else "sum"}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **how)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.words(input_ids))
        return {"loss": self.loss_function(logits, labels, **kwargs), "logits": logits}


def train_language(folder, options):
    words = torch.randint(9, (16, 6), generator=torch.Generator().manual_seed(1))
    labels = words.clone()
    labels[2:4, 1:] = -100  # rank 1 of 2 begins with rows whose only label is no target of a model that shifts
    args = TrainingArguments(
        folder, **COMMON | options, train_sampling_strategy="sequential", logging_steps=1, label_names=["labels"]
    )
    data = [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]
    trainer = Trainer(Language(), args, train_dataset=data)
    return outcome(trainer, lambda each: [e["loss"] for e in each.train() and each.state.log_history if "loss" in e])


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp", "fsdp": "full_shard"}], ids=["ddp", "fsdp"])
def test_a_rank_whose_first_rows_have_no_target_makes_the_forwards_of_the_others(options, tmp_path):
    first, second = run_ranks(train_language, 2, str(tmp_path), options, timeout_s=120)
    assert first == second
    alone = train_language(str(tmp_path), {"gradient_accumulation_steps": 2})
    assert first == pytest.approx(alone, rel=1e-5)


def predict(folder, without, options, seq2seq=False):
    kind, arguments = (Seq2SeqTrainer, Seq2SeqTrainingArguments) if seq2seq else (Trainer, TrainingArguments)
    trainer = kind(Network(), arguments(folder, **COMMON, **options))
    return outcome(trainer, lambda each: each.predict(data(8, *without)).metrics["test_loss"])


@pytest.mark.parametrize("options", [{}, {"eval_use_gather_object": True}])
def test_an_evaluation_in_which_a_rank_has_no_labels_is_refused_on_all(options, tmp_path):
    for text in run_ranks(predict, 2, str(tmp_path), (6, 7), options, timeout_s=120):
        assert text.startswith("batch 2 of this evaluation differs between ranks, and cannot be joined: rank 0 has")
        assert "rank 1 has" in text


def test_a_generation_for_which_a_rank_has_no_labels_is_refused_on_all(tmp_path):
    options = {"predict_with_generate": True}
    for text in run_ranks(predict, 2, str(tmp_path), (2, 3), options, True, timeout_s=120):
        assert text.startswith("a batch of this evaluation differs between ranks, and cannot be joined: rank 0 has")


def test_an_evaluation_without_labels_on_all_ranks_has_predictions(tmp_path):
    expected = predict(str(tmp_path), (), {})
    for loss in run_ranks(predict, 2, str(tmp_path), (), {}, timeout_s=120):
        assert loss == pytest.approx(expected, rel=1e-6)


def predict_outputs(folder):
    trainer = Trainer(MayDiffer(), TrainingArguments(folder, **COMMON))
    samples = data(8)
    samples[2]["x"][0] = 7
    return outcome(trainer, lambda each: each.predict(samples).metrics)


def test_outputs_of_one_rank_alone_are_refused_on_all(tmp_path):
    for text in run_ranks(predict_outputs, 2, str(tmp_path), timeout_s=120):
        assert text.startswith("batch 1 of this evaluation differs between ranks")
        assert "ignore_keys" in text
