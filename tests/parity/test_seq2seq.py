"""Evaluation on what a model generates: the same generations, metrics and losses as the reference's."""

import functools

import numpy as np
import parity_models as models
import pytest
import torch
import transformers
from parity_harness import OURS, REFERENCE, assert_same_metrics, is_same_value, warnings_of, without_times

import tr_core

IGNORED, VOCABULARY = -100, 17
STEPS = 60  # of teaching: few enough that not every token is right

LIBRARIES = {REFERENCE: transformers, OURS: tr_core}


def bart():
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        dropout=0.0,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    return transformers.BartForConditionalGeneration(config)


MODELS = {"t5": models.t5, "bart": bart}
END = {"t5": 1, "bart": 2}


def pairs(name="t5", count=9, lengths=(3, 9)):
    """Return source rows of different lengths, and as targets each source turned round, with the end token."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(*lengths, (count,), generator=generator).tolist()
    sources = [torch.randint(3, VOCABULARY, (size,), generator=generator) for size in sizes]
    return [{"input_ids": row, "labels": torch.cat([row.flip(0), torch.tensor([END[name]])])} for row in sources]


@functools.cache
def taught(name):
    """Return weights of a model that has learnt `pairs`: one that has learnt nothing writes one token for ever."""
    torch.manual_seed(0)
    model, batch = MODELS[name](), padded(pairs(name))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return model.state_dict()


def padded(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(inputs, batch_first=True, padding_value=1),
        "attention_mask": pad([torch.ones_like(row) for row in inputs], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=IGNORED),
    }


class Collator:
    """Pads a batch and gives the decoder its inputs, as the collator of transformers does.

    A class of its own: that one needs a tokenizer.
    """

    def __init__(self, model):
        self.model = model

    def __call__(self, rows):
        batch = padded(rows)
        return {**batch, "decoder_input_ids": self.model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])}


def tokens_of(row):
    """Return the tokens of a row, without what begins, ends and fills it up."""
    return [int(token) for token in row if token not in (IGNORED, 0, 1, 2)]


def overlap(prediction):
    """Share of tokens that stand where the target has them; of no interest but that both must give the same."""
    pairs_of = zip(prediction.predictions, prediction.label_ids, strict=True)
    hits = [np.mean([a == b for a, b in zip(tokens_of(p), tokens_of(t), strict=False)] or [0]) for p, t in pairs_of]
    return {"overlap": np.mean(hits), "length": np.mean([len(tokens_of(p)) for p in prediction.predictions])}


def arguments_of(side, folder, **arguments):
    common = {
        "output_dir": str(folder / side.name),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_eval_batch_size": 4,
        "predict_with_generate": True,
        "generation_max_length": 12,
    }
    return LIBRARIES[side].Seq2SeqTrainingArguments(**{**common, **arguments})


def build(side, folder, name="t5", *, collate=padded, settings=None, parts=None, **arguments):
    """Build one side's trainer; `settings` go to the model's generation settings, `parts` to the constructor."""
    model = MODELS[name]()
    model.load_state_dict(taught(name))
    for key, value in (settings or {}).items():
        setattr(model.generation_config, key, value)
    with warnings_of(side):
        return LIBRARIES[side].Seq2SeqTrainer(
            model=model,
            args=arguments_of(side, folder, **arguments),
            data_collator=collate(model) if isinstance(collate, type) else collate,
            eval_dataset=pairs(name),
            compute_metrics=overlap if arguments.get("predict_with_generate", True) else None,
            **(parts or {}),
        )


def predict(folder, name="t5", samples=None, call=None, **options):
    """Predict with both, and return both results; `call` are options of the call itself."""
    results = []
    for side in LIBRARIES:
        trainer = build(side, folder, name, **options)
        with warnings_of(side):
            results.append(trainer.predict(pairs(name) if samples is None else samples, **(call or {})))
    return results


def assert_same_texts(reference, ours):
    assert [tokens_of(row) for row in ours.predictions] == [tokens_of(row) for row in reference.predictions]
    if reference.label_ids is None:
        assert ours.label_ids is None
    else:
        assert [tokens_of(row) for row in ours.label_ids] == [tokens_of(row) for row in reference.label_ids]


def assert_same_results(reference, ours):
    assert_same_texts(reference, ours)
    assert_same_metrics(without_times(reference.metrics), without_times(ours.metrics))


def even_pairs(name="t5"):
    """Return pairs with as many targets each: the reference weights batches by rows, ours by targets."""
    return pairs(name, 8, lengths=(5, 6))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "arguments", [{}, {"generation_num_beams": 3}, {"generation_max_length": 25}, {"generation_max_length": 5}]
)
def test_generations_metrics_and_losses_are_the_same(tmp_path, name, arguments):
    assert_same_results(*predict(tmp_path, name, even_pairs(name), **arguments))


@pytest.mark.parametrize("collate", [padded, Collator])
@pytest.mark.parametrize("name", MODELS)
def test_decoder_inputs_that_come_from_labels_are_not_continued(tmp_path, name, collate):
    assert_same_results(*predict(tmp_path, name, even_pairs(name), collate=collate))


@pytest.mark.parametrize(
    "call",
    [
        {"max_length": 7},
        {"max_new_tokens": 4},
        {"num_beams": 2, "max_length": 9},
        {"do_sample": False, "num_beams": 2, "no_repeat_ngram_size": 2},
        {"max_length": None, "num_beams": None},
        {"metric_key_prefix": "held_out", "max_length": 6},
    ],
)
def test_options_of_a_call_act_the_same(tmp_path, call):
    assert_same_results(*predict(tmp_path, samples=even_pairs(), call=call, generation_num_beams=1))


def test_without_labels_there_are_the_same_generations(tmp_path):
    samples = [{"input_ids": row["input_ids"]} for row in pairs()]

    def collate(rows):
        batch = padded([{**row, "labels": row["input_ids"]} for row in rows])
        return {name: value for name, value in batch.items() if name != "labels"}

    reference, ours = predict(tmp_path, samples=samples, collate=collate)
    assert_same_results(reference, ours)
    assert ours.label_ids is None


@pytest.mark.parametrize("length", [20, 25])
def test_arrays_are_the_same_where_the_settings_say_the_length(tmp_path, length):
    reference, ours = predict(
        tmp_path, samples=even_pairs(), settings={"max_length": length}, generation_max_length=None
    )
    assert ours.predictions.shape == (8, length)
    np.testing.assert_array_equal(ours.predictions, reference.predictions)
    np.testing.assert_array_equal(ours.label_ids, reference.label_ids)


def test_settings_by_object_and_by_path_act_the_same(tmp_path):
    given = transformers.GenerationConfig(
        max_length=9, num_beams=2, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1
    )
    given.save_pretrained(tmp_path / "settings")
    file = str(tmp_path / "settings" / "generation_config.json")
    for settings in (given, str(tmp_path / "settings"), file):
        results = predict(tmp_path, samples=even_pairs(), generation_config=settings, generation_max_length=None)
        assert_same_results(*results)
        np.testing.assert_array_equal(results[0].predictions, results[1].predictions)


def test_invalid_settings_are_refused_by_both(tmp_path):
    invalid = transformers.GenerationConfig(do_sample=False, temperature=0.5)
    for side in LIBRARIES:
        with pytest.raises(ValueError, match="temperature"):
            build(side, tmp_path, generation_config=invalid)


def test_evaluation_without_generating_is_the_same(tmp_path):
    results = []
    for side in LIBRARIES:
        trainer = build(side, tmp_path, predict_with_generate=False)
        with warnings_of(side):
            results.append(without_times(trainer.evaluate(even_pairs())))
    assert_same_metrics(*results)


def test_label_smoothing_is_in_the_loss_of_both(tmp_path):
    reference, ours = predict(tmp_path, samples=even_pairs(), collate=Collator, label_smoothing_factor=0.2)
    assert_same_results(reference, ours)
    plain = predict(tmp_path, samples=even_pairs(), collate=Collator)[1]
    assert ours.metrics["test_loss"] != plain.metrics["test_loss"]


def test_training_with_generations_in_every_evaluation_is_the_same(tmp_path):
    histories = []
    for side in LIBRARIES:
        trainer = build(
            side,
            tmp_path,
            parts={"train_dataset": even_pairs()},
            eval_strategy="epoch",
            num_train_epochs=2,
            logging_steps=1,
            learning_rate=0.01,
        )
        trainer.eval_dataset = even_pairs()
        with warnings_of(side):
            trainer.train()
        histories.append([without_times(entry) for entry in trainer.state.log_history if "train_loss" not in entry])
    for expected, entry in zip(*histories, strict=True):
        assert_same_metrics(expected, entry)
    assert sum("eval_overlap" in entry for entry in histories[1]) == 2


# What the reference does not do


def test_settings_of_the_model_stay_as_they_are(tmp_path):
    """The reference writes defaults into them in an evaluation, and they are saved with the model."""
    trainer = build(OURS, tmp_path)
    before = trainer.model.generation_config.to_dict()
    trainer.predict(even_pairs())
    assert trainer.model.generation_config.to_dict() == before


def test_compute_loss_func_is_the_loss_beside_generations_too(tmp_path):
    """The reference takes the model's own loss there; its evaluation without generating takes the function's."""

    def doubled(outputs, labels, num_items_in_batch=None):
        return 2 * torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels, ignore_index=IGNORED)

    losses = {}
    for side, generating in ((REFERENCE, False), (OURS, False), (OURS, True)):
        parts = {"compute_loss_func": doubled}
        trainer = build(side, tmp_path, collate=Collator, parts=parts, predict_with_generate=generating)
        with warnings_of(side):
            losses[side, generating] = trainer.evaluate(even_pairs())["eval_loss"]
    assert losses[OURS, True] == losses[OURS, False]
    assert is_same_value(losses[REFERENCE, False], losses[OURS, False], 1e-6)
