"""What a mistake in data or model says: the same in `trainer check` and in the run, whose error stays what it is."""

from types import SimpleNamespace

import pytest
import torch
from support.data import samples
from support.models import Classifier
from torch import nn

from tr_core import Trainer
from tr_core.preflight import check
from tr_core.preflight.diagnosis import Failure


class Words(nn.Module):
    """Embeds words and classifies them, as models of transformers do."""

    main_input_name = "input_ids"

    def __init__(self, rows=10):
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(rows, 8), nn.Embedding(6, 8), nn.Linear(8, 3)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids=None, labels=None):
        if input_ids is None:
            raise ValueError("You have to specify input_ids")
        places = self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        logits = self.head((self.words(input_ids) + places).mean(1))
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


class Full(Classifier):
    def forward(self, x, labels=None):
        if self.training or not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x, labels)


class Frame:
    """As far as a data set reads it, a DataFrame."""

    iloc = property(lambda self: self)

    def __len__(self):
        return 8

    def __getitem__(self, name):
        raise KeyError(name)


def rows(number=8, bad=5, **values):
    """Samples of which one has other values."""
    made = samples(number)
    made[bad].update(values)
    return made


def rows_of_words(number=8, bad=None, **values):
    made = [{"input_ids": [1, 2, 3], "labels": index % 3} for index in range(number)]
    if bad is not None:
        made[bad].update(values)
    return made


TOO_MANY = torch.tensor([0.0, float("nan")] + [0.0] * 6)
MISTAKES = {
    "a label out of range": (
        Classifier,
        rows(labels=torch.tensor(7)),
        {},
        IndexError,
        "T405",
        "sample 5 of the training data has the label 7, but the model has 3",
    ),
    "an id beyond the vocabulary": (
        Words,
        rows_of_words(bad=1, input_ids=[1, 10, 3]),
        {},
        IndexError,
        "T514",
        "holds the id 10, but the model's embedding has 10 rows",
    ),
    "samples longer than the positions": (
        Words,
        [{"input_ids": [1] * 7, "labels": 0}] * 8,
        {},
        IndexError,
        "T514",
        "samples are too long for the model",
    ),
    "labels with a fraction": (
        Classifier,
        [{**row, "labels": float(row["labels"])} for row in samples(8)],
        {},
        RuntimeError,
        "T408",
        "the labels are float32 of the shape",
    ),
    "text that was not tokenized": (
        Words,
        [{"text": "a b", "labels": 1}] * 8,
        {},
        ValueError,
        "T502",
        "needs input_ids, and the micro-batch has ['labels']; columns ['text'] of the data were left out, as they are",
    ),
    "words in place of ids": (
        Words,
        [{"input_ids": ["a", "b"], "labels": 1}] * 8,
        {},
        ValueError,
        "T402",
        "column 'input_ids' holds strings: tokenize them first",
    ),
    "a data set of strings": (
        Words,
        ["one", "two"] * 4,
        {},
        TypeError,
        "T402",
        "the data set holds strings such as 'one'",
    ),
    "samples of unequal length": (
        Words,
        [{"labels": torch.tensor(1), "input_ids": torch.ones(2 + index % 2, dtype=torch.long)} for index in range(8)],
        {},
        ValueError,
        "T402",
        "column 'input_ids' has rows of 2 to 3 values, which cannot be stacked",
    ),
    "a column of another name": (
        Classifier,
        [{"features": row["x"], "labels": 1} for row in samples(8)],
        {},
        TypeError,
        "T502",
        "the forward method of Classifier needs x, and the micro-batch has ['labels']; columns ['features'] of",
    ),
    "numbers of another type than the weights": (
        Classifier,
        [{**row, "x": row["x"].double()} for row in samples(8)],
        {},
        RuntimeError,
        "T502",
        "the micro-batch holds x float64 (",
    ),
    "too many features": (
        Classifier,
        [{**row, "x": torch.cat([row["x"], row["x"]])} for row in samples(8)],
        {},
        RuntimeError,
        "T502",
        "the micro-batch holds x float32 (",
    ),
    "a number for each class as the label": (
        Classifier,
        [{**row, "labels": torch.tensor([0, 0, 1])} for row in samples(8)],
        {},
        RuntimeError,
        "T408",
        "3), and a cross entropy takes class numbers: make them one whole number (int64) for each sample",
    ),
    "a table in place of samples": (Classifier, Frame(), {}, TypeError, "T101", "whose [0] is a column and no sample"),
    "no labels": (
        Classifier,
        [{"x": row["x"], "target": 1} for row in samples(8)],
        {},
        ValueError,
        "T503",
        "no labels among ['x']; columns ['target'] of the data were left out",
    ),
    "a feature that is not a number": (
        Classifier,
        rows(bad=6, x=TOO_MANY),
        {"on_nonfinite": "raise"},
        FloatingPointError,
        "T409",
        "column 'x' of sample 6 of the training data holds nan",
    ),
    "too little memory": (
        Full,
        samples(8),
        {"gradient_accumulation_steps": 2},
        torch.OutOfMemoryError,
        "T306",
        "per_device_train_batch_size=4 and gradient_accumulation_steps=2: set them to 2 and 4, which keeps the samples",
    ),
}
ROWS = pytest.mark.parametrize(
    ("model", "data", "options", "kind", "code", "words"), MISTAKES.values(), ids=list(MISTAKES)
)


def told(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def trainer_of(make_trainer, model, data, **options):
    options = {"train_sampling_strategy": "sequential", "logging_steps": 1, **options}
    return make_trainer(model=model(), train_dataset=data, **options)


@ROWS
def test_a_run_keeps_its_error_and_notes_what_is_wrong(make_trainer, model, data, options, kind, code, words):
    trainer = trainer_of(make_trainer, model, data, **options)
    with pytest.raises(kind) as caught:
        trainer.train()
    assert type(caught.value) is kind
    assert words in told(caught.value)


@ROWS
def test_a_check_says_the_same(make_trainer, model, data, options, kind, code, words):
    report = check(trainer_of(make_trainer, model, data, **options))
    [problem] = [problem for problem in report.problems if problem.code == code]
    assert words in problem.message


@pytest.mark.parametrize("name", ["an id beyond the vocabulary", "labels with a fraction", "a data set of strings"])
def test_an_evaluation_notes_it_too_and_names_its_own_data(make_trainer, name):
    model, data, _, kind, _, words = MISTAKES[name]
    trainer = make_trainer(model=model(), train_dataset=None, eval_dataset=data)
    with pytest.raises(kind) as caught:
        trainer.evaluate()
    assert words in told(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"input_ids": [1, 10, 3]}, "column 'input_ids' of sample 1 of the training data holds the id 10"),
        ({"labels": 5}, "sample 1 of the training data has the label 5, but the model has 3 classes"),
    ],
)
def test_an_index_by_which_a_gpu_is_lost_is_looked_for_on_the_host(make_trainer, monkeypatch, values, words):
    monkeypatch.setattr(Failure, "lost_device", True)

    class Lost(Words):
        config = SimpleNamespace(num_labels=3)

        def forward(self, input_ids=None, labels=None):
            raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError) as caught:
        trainer_of(make_trainer, Lost, rows_of_words(bad=1, **values)).train()
    assert words in told(caught.value)


def test_a_loading_process_that_cannot_make_a_batch_gives_the_same_note(make_trainer):
    model, data, _, kind, _, words = MISTAKES["words in place of ids"]
    trainer = trainer_of(make_trainer, model, data, dataloader_num_workers=1)
    with pytest.raises(kind) as caught:
        trainer.train()
    assert words in told(caught.value)


def test_names_are_not_blamed_where_an_override_gives_the_model_others(make_trainer):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            raise TypeError("mine")

    data = [{"features": row["x"], "labels": 1} for row in samples(8)]
    with pytest.raises(TypeError, match="mine") as caught:
        make_trainer(trainer_class=Own, train_dataset=data, remove_unused_columns=False).train()
    assert not any("needs x" in note for note in caught.value.__notes__)


def test_an_error_of_another_kind_says_only_what_the_micro_batch_held(make_trainer):
    class Failing(Classifier):
        def forward(self, x, labels=None):
            raise LookupError("no table")

    with pytest.raises(LookupError) as caught:
        make_trainer(model=Failing()).train()
    assert caught.value.__notes__ == ["the micro-batch holds x float32 (4, 8), labels int64 (4,)"]


def test_an_error_of_a_callback_is_no_error_of_the_batch(make_trainer):
    class Failing:
        def on_step_end(self, args, state, control, **kwargs):
            reads.append(len(data.read))
            raise IndexError("list index out of range")

    class Noted(list):
        read = []

        def __getitem__(self, index):
            self.read.append(index)
            return super().__getitem__(index)

    data, reads = Noted({"x": row["x"]} for row in samples(8)), []

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs)["logits"].square().mean()

    with pytest.raises(IndexError) as caught:
        make_trainer(trainer_class=Own, train_dataset=data, callbacks=[Failing()]).train()
    assert getattr(caught.value, "__notes__", []) == []
    assert reads == [len(data.read)] != [0]
