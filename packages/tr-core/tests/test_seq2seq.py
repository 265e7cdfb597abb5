"""Evaluation and prediction on generated tokens."""

import json

import pytest
import torch
from support.data import sentences
from support.models import IGNORED, Classifier, Generator, Settings

from tr_core import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments

PAD = 9


@pytest.fixture
def make(tmp_path):
    def build(model=None, data=None, trainer_class=Seq2SeqTrainer, **options):
        parts = {
            name: options.pop(name)
            for name in ("compute_metrics", "processing_class", "data_collator", "model_init", "callbacks")
            if name in options
        }
        settings = {"predict_with_generate": True, "save_strategy": "no", "disable_tqdm": True, "log_level": "error"}
        args = Seq2SeqTrainingArguments(
            str(tmp_path / "out"), use_cpu=True, per_device_eval_batch_size=2, **{**settings, **options}
        )
        if "model_init" not in parts:
            parts["model"] = Generator() if model is None else model
        data = sentences() if data is None else data
        return trainer_class(args=args, train_dataset=data, eval_dataset=data, **parts)

    return build


def test_predictions_are_what_the_model_generates_padded_to_the_length_it_may_have(make):
    output = make(generation_max_length=5).predict(sentences())
    assert output.predictions.tolist() == [
        [0, 3, 4, 5, PAD],
        [0, 3 - 2, 2, 3, PAD],
        [0, 2, 3, 4, 5],
        [0, 5, 6, 7, 8],
        [0, 4, 5, 6, 7],
    ]
    assert output.label_ids.tolist() == [[n, n + 1, PAD, PAD, PAD] for n in (3, 1, 2, 5, 4)]


def test_the_loss_is_that_of_an_evaluation_without_generating(make):
    model, data = Generator(), sentences()
    for row, masked in zip(data, (0, 1, 1, 0, 1), strict=True):
        row["labels"] = torch.tensor([IGNORED] * masked + row["labels"].tolist()[masked:])
    plain = make(model, data, predict_with_generate=False).evaluate()
    generating = make(model, data, compute_metrics=lambda p: {}).evaluate()
    assert generating["eval_loss"] == plain["eval_loss"]
    assert make(model, data).predict(data).metrics["test_loss"] == plain["eval_loss"]


def test_nothing_is_generated_where_nobody_looks(make):
    trainer = make()
    trainer.evaluate()
    assert trainer.model.calls == []
    trainer = make(prediction_loss_only=True, compute_metrics=lambda p: {})
    trainer.evaluate()
    trainer.predict(sentences())
    assert trainer.model.calls == []


def test_without_labels_there_is_no_loss_and_no_forward(make):
    trainer = make(generation_max_length=4)
    trainer.model.embedding = None
    output = trainer.predict([{"input_ids": row["input_ids"]} for row in sentences()])
    assert output.predictions.shape == (5, 4)
    assert output.label_ids is None
    assert "test_loss" not in output.metrics


def test_options_of_a_call_go_before_the_arguments_and_end_with_it(make):
    trainer = make(generation_max_length=6, generation_num_beams=2, compute_metrics=lambda p: {})
    calls = trainer.model.calls
    trainer.evaluate()
    trainer.evaluate(max_length=4, num_beams=3, do_sample=False)
    trainer.predict(sentences(), max_new_tokens=2)
    trainer.evaluate(max_length=None, num_beams=None)
    assert calls[0] == {"max_length": 6, "num_beams": 2}
    assert calls[3] == {"max_length": 4, "num_beams": 3, "do_sample": False}
    assert calls[6] == {"max_new_tokens": 2, "num_beams": 2}
    assert calls[9] == {"max_length": 6, "num_beams": 2}


def test_options_of_a_call_hold_for_each_of_several_data_sets(make):
    trainer = make(compute_metrics=lambda p: {})
    trainer.evaluate({"a": sentences((3,)), "b": sentences((2,))}, max_length=3)
    assert trainer.model.calls == [{"max_length": 3}] * 2


def test_options_end_with_a_call_that_fails(make):
    trainer = make(compute_metrics=lambda p: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(max_length=3)
    trainer.compute_metrics = lambda p: {}
    trainer.evaluate()
    assert trainer.model.calls[-1] == {}


def test_an_override_may_pass_options_to_the_step(make):
    class Short(Seq2SeqTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **options):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, max_length=3)

    output = make(trainer_class=Short, generation_max_length=9).predict(sentences())
    assert output.predictions.shape == (5, 3)


@pytest.mark.parametrize(
    ("settings", "options", "width"),
    [
        (Settings(max_length=7), {}, 7),
        (Settings(max_new_tokens=6), {}, 7),  # and the token that every row begins with
        (Settings(max_length=7), {"max_new_tokens": 3}, 4),
        (Settings(max_length=7), {"max_length": 3}, 3),
        (Settings(max_length=7), {"generation_config": Settings(max_length=8)}, 8),
        (Settings(), {}, 21),  # what transformers generates if nothing says how much
        (None, {}, 6),  # not known: rows are as long as they came out, and -100 follows
    ],
)
def test_rows_are_padded_to_the_length_that_holds_for_the_call(make, settings, options, width):
    model = Generator()
    model.generation_config = settings
    output = make(model).predict(sentences(), **options)
    assert output.predictions.shape == (5, width)
    fill = IGNORED if settings is None else PAD
    assert (output.predictions[1, 4:] == fill).all()


def test_a_length_that_is_asked_for_goes_before_new_tokens_in_the_settings(make):
    trainer = make(Generator(settings=Settings(max_new_tokens=2)), generation_max_length=6)
    assert trainer.predict(sentences()).predictions.shape == (5, 6)
    assert trainer.model.calls[0] == {"max_length": 6, "max_new_tokens": None}
    assert trainer.predict(sentences(), max_new_tokens=1).predictions.shape == (5, 2)


def test_a_model_without_an_encoder_continues_its_prompt(make):
    output = make(Generator(encoder=False)).predict(sentences((3, 1, 2)), max_new_tokens=4)
    assert output.predictions.tolist() == [
        [3, 3, 3, 3, 3, 4, 5, PAD],
        [1, 1, 1, 1, 1, 2, 3, PAD],
        [2, 2, 2, 2, 2, 3, PAD, PAD],
    ]


class Shifting:
    """Collates as for an encoder and decoder: the decoder's inputs are the labels, moved by one."""

    def __init__(self, width=None):
        self.width = width

    def __call__(self, rows):
        labels = torch.stack([row["labels"] for row in rows])
        width = labels.shape[1] if self.width is None else self.width
        return {
            "input_ids": torch.stack([row["input_ids"] for row in rows]),
            "labels": labels,
            "decoder_input_ids": torch.zeros(len(rows), width).long(),
        }


def test_decoder_inputs_that_were_made_of_labels_and_the_labels_are_not_generated_from(make):
    trainer = make(data_collator=Shifting())
    trainer.predict(sentences())
    assert trainer.model.calls[0] == {}
    trainer = make(data_collator=Shifting(width=1))
    trainer.predict(sentences())
    assert set(trainer.model.calls[0]) == {"decoder_input_ids"}


class Tokenizer:
    def __init__(self, pad_token_id=None, eos_token_id=None):
        self.pad_token_id, self.eos_token_id = pad_token_id, eos_token_id


class Processor:
    tokenizer = Tokenizer(pad_token_id=7)


@pytest.mark.parametrize(
    ("processing_class", "fill"),
    [(Tokenizer(5), 5), (Tokenizer(None, 6), 6), (Tokenizer(None, [4, 6]), 4), (Processor(), 7), (None, PAD)],
)
def test_the_padding_token_is_that_of_the_tokenizer_or_of_the_model(make, processing_class, fill):
    trainer = make(processing_class=processing_class, generation_max_length=8)
    assert trainer.predict(sentences()).predictions[0].tolist()[4:] == [fill] * 4


def test_rows_are_padded_and_settings_loaded_by_the_methods_of_a_subclass(make):
    class Own(Seq2SeqTrainer):
        def _pad_tensors_to_max_len(self, tensor, max_length):
            return torch.nn.functional.pad(tensor, (0, max_length - tensor.shape[-1]), value=-7)

        @staticmethod
        def load_generation_config(gen_config_arg):
            return Settings(max_length=6)

    trainer = make(trainer_class=Own, generation_config=Settings(max_length=3))
    output = trainer.predict(sentences())
    assert trainer.model.generation_config.max_length == 6
    assert output.predictions[0].tolist() == [0, 3, 4, 5, -7, -7]
    assert output.label_ids[0].tolist() == [3, 4, -7, -7, -7, -7]


def test_rows_that_cannot_be_padded_are_an_error(make):
    with pytest.raises(ValueError, match="rows of 2 tokens are to be padded to 8, but neither the tokenizer nor"):
        make(Generator(pad=None), generation_max_length=8).predict(sentences())


def test_more_generations_than_samples_are_an_error(make):
    model = Generator()
    model.generate = lambda input_ids, **options: torch.zeros(2 * len(input_ids), 3).long()
    with pytest.raises(ValueError, match="generated 4 rows for 2 samples.*num_return_sequences"):
        make(model).predict(sentences())


def test_a_result_with_sequences_is_taken_apart(make):
    model = Generator()
    plain = model.generate
    model.generate = lambda **options: type("Output", (), {"sequences": plain(**options)})
    assert make(model).predict(sentences(), max_length=4).predictions.shape == (5, 4)


# Settings


def write_settings(folder, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(settings))
    return path


def test_settings_are_an_object_a_dict_a_folder_or_a_file(make, tmp_path):
    file = write_settings(tmp_path / "named", max_length=5)
    given = Settings(max_length=5)
    for settings in (given, {"max_length": 5}, str(file.parent), str(file), file):
        trainer = make(generation_config=settings)
        assert trainer.model.generation_config.max_length == 5
        assert trainer.model.generation_config is not given
        assert trainer.predict(sentences()).predictions.shape == (5, 5)


def test_settings_hold_for_every_model_that_model_init_makes(make):
    made = []
    trainer = make(
        model_init=lambda: made.append(Generator()) or made[-1], generation_config={"max_length": 5}, max_steps=1
    )
    trainer.train()
    trainer.train()
    assert [model.generation_config.max_length for model in made] == [5, 5]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 0}, "num_beams is 0"),
        (Settings(num_beams=0), "num_beams is 0"),
        ("no/such/folder", "there is no no/such/folder/generation_config.json"),
    ],
)
def test_invalid_settings_are_an_error_before_anything_is_trained(make, settings, reason):
    with pytest.raises(ValueError, match=f"generation_config=.* cannot be used: {reason}.*saved with the model"):
        make(generation_config=settings)


def test_settings_by_name_need_a_model_that_has_some(make):
    model = Generator()
    del model.generation_config
    with pytest.raises(ValueError, match="generation_config='some' says where.*Generator has no generation_config"):
        make(model, generation_config="some")


# Arguments


def test_a_model_that_cannot_generate_is_refused_at_once(make):
    with pytest.raises(ValueError, match="predict_with_generate=True needs a model with a method generate.*Classifier"):
        make(Classifier())
    make(Classifier(), predict_with_generate=False)


def test_other_arguments_are_refused_and_without_any_nothing_is_generated(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="needs Seq2SeqTrainingArguments.*args is a TrainingArguments"):
        Seq2SeqTrainer(Generator(), TrainingArguments(str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    assert not Seq2SeqTrainer(Generator()).args.predict_with_generate


def test_options_without_generating_are_said_to_have_no_effect_and_unknown_ones_refused(make, caplog):
    trainer = make(predict_with_generate=False, log_level="warning")
    trainer.logger.propagate = True
    trainer.evaluate(max_length=5, num_beams=None)
    assert "max_length=5, num_beams=None given, and nothing is generated" in caplog.text
    with pytest.raises(TypeError, match="unknown arguments metric_prefix: they belong neither to evaluate and predict"):
        trainer.evaluate(metric_prefix="test")


def test_batches_without_names_cannot_be_generated_from(make):
    trainer = make(data_collator=lambda rows: (torch.stack([row["input_ids"] for row in rows]),))
    with pytest.raises(ValueError, match="needs batches that name their parts, not a tuple"):
        trainer.predict(sentences())
