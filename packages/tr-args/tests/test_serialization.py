"""Arguments go to plain values and come back equal."""

import json
import random
import sys
from dataclasses import MISSING, dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import pytest

from tr_args import ArgumentParser, ArgumentsError, Duration, Seq2SeqTrainingArguments, TrainingArguments
from tr_args.flags import members
from tr_args.schema import schema
from tr_args.types.choices import StepRange

FULL = {
    "output_dir": "out",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "optim_target_modules": ["attn", "mlp"],
    "report_to": ["a,b", "c"],
    "label_names": [],
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block"},
    "accelerator_config": {"even_batches": False},
    "eval_strategy": "steps",
    "logging_steps": 0.1,
    "resume_from_checkpoint": True,
}


def drawn(rng, name, spec):
    """Return a random value of a field, or MISSING to leave it out."""
    member = rng.choice(members(spec.hint))
    kind = get_origin(member) or member
    if name in ("fsdp", "fsdp_config", "debug", "optim_args", "accelerator_config", "generation_config", "hub_token"):
        return MISSING
    if kind is Literal:
        return rng.choice(get_args(member))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return rng.choice(list(kind)).value
    makers = {
        bool: lambda: rng.random() < 0.5,
        int: lambda: rng.randint(1, 1000),
        float: lambda: rng.choice([round(rng.random() * 0.9, 6), 10.0 ** -rng.randint(1, 9)]),
        str: lambda: "".join(rng.choices("ab-_,.='\"{}[] é1", k=rng.randint(1, 8))),
        dict: lambda: {"a": rng.random(), "b": [None, True, "x"]},
        type(None): lambda: None,
        StepRange: lambda: f"{rng.randint(1, 90)}:{rng.randint(90, 99)}",
        Duration: lambda: f"{rng.randint(1, 90)}{rng.choice(['s', 'min', 'h', 'h30min'])}",
    }
    if kind is list:
        words = get_args(get_args(member)[0]) or ("p", "q,r", "[s")
        return rng.choices(words, k=rng.randint(0, 3))
    return makers[kind]()


def draws(count):
    """Yield arguments with random values; combinations that the rules refuse are left out."""
    rng = random.Random(0)
    fields = schema(Seq2SeqTrainingArguments)
    for _ in range(count):
        values = {name: drawn(rng, name, fields[name]) for name in rng.sample(sorted(fields), 6)}
        values = {name: value for name, value in values.items() if value is not MISSING}
        try:
            yield values, Seq2SeqTrainingArguments(**values)
        except ArgumentsError:
            continue


def test_arguments_come_back_equal_from_their_dict_and_from_json():
    made = 0
    for values, args in draws(150):
        assert Seq2SeqTrainingArguments.from_dict(args.to_dict()) == args, values
        assert Seq2SeqTrainingArguments.from_dict(json.loads(args.to_json_string())) == args, values
        made += 1
    assert made > 75


def test_arguments_come_back_equal_from_a_file_of_their_json(tmp_path):
    args = TrainingArguments(**FULL)
    (tmp_path / "args.json").write_text(args.to_json_string())
    (read,) = ArgumentParser(TrainingArguments).parse_json_file(tmp_path / "args.json")
    assert read == args


def test_arguments_come_back_equal_from_a_command_line():
    parser = ArgumentParser(Seq2SeqTrainingArguments)
    defaults = Seq2SeqTrainingArguments().to_dict()
    for _, args in draws(100):
        words = []
        for name, value in args.to_dict().items():
            if value != defaults[name]:
                words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
        (parsed,) = parser.parse_args_into_dataclasses(words)
        assert parsed == args, words


def test_converting_a_converted_value_again_changes_nothing():
    for _, args in draws(60):
        for name in args.to_dict():
            value = getattr(args, name)
            setattr(args, name, value)
            assert getattr(args, name) == value


def test_secrets_are_masked_wherever_arguments_are_shown():
    args = TrainingArguments("out", hub_token="hf_secret")
    assert args.to_dict()["hub_token"] == "<HUB_TOKEN>"
    shown = [str(args), repr(args), args.to_json_string(), str(args.to_sanitized_dict())]
    assert [text for text in shown if "hf_secret" in text or "<HUB_TOKEN>" not in text] == []
    assert TrainingArguments.from_dict(args.to_dict()).hub_token is None
    assert TrainingArguments.from_dict({"hub_token": "other"}).hub_token == "other"


def test_no_secret_is_shown_where_it_is_refused():
    args = TrainingArguments()
    for provoke in (
        lambda: TrainingArguments(hub_token={"hf_secret"}),
        lambda: setattr(args, "hub_token", {"hf_secret"}),
        lambda: args.set_push_to_hub("me/model", token={"hf_secret"}),
    ):
        with pytest.raises(ArgumentsError) as caught:
            provoke()
        assert "hf_secret" not in str(caught.value) + repr(caught.value.problems)


def test_values_for_trackers_are_scalars_or_text():
    values = TrainingArguments(**FULL).to_sanitized_dict()
    assert {type(value) for value in values.values()} <= {bool, int, float, str}
    assert values["train_batch_size"] == 8
    assert values["fsdp"] == "['full_shard', 'auto_wrap']"
    assert values["eval_strategy"] == "steps"


def test_an_object_that_describes_itself_is_written_by_its_own_description():
    class Settings:
        def to_dict(self):
            return {"max_new_tokens": 5}

    args = Seq2SeqTrainingArguments(generation_config=Settings())
    assert args.to_dict()["generation_config"] == {"max_new_tokens": 5}


def test_a_dtype_is_written_by_its_name_and_read_again(monkeypatch):
    class dtype:  # noqa: N801 - named as torch's, which these tests do not install
        def __init__(self, name):
            self.name = name

        def __repr__(self):
            return f"torch.{self.name}"

    dtype.__module__ = "torch"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(bfloat16=dtype("bfloat16"), nn=None))

    @dataclass
    class Precise(TrainingArguments):
        weights: dtype = field(default_factory=lambda: dtype("float32"))

    assert Precise().to_dict()["weights"] == "float32"
    for text in ("bfloat16", "torch.bfloat16"):
        assert Precise(weights=text).weights is sys.modules["torch"].bfloat16
    with pytest.raises(ArgumentsError, match="weights.*needs the name of a dtype of torch, such as bfloat16"):
        Precise(weights="nn")


def test_unknown_keys_of_a_dict_are_refused():
    with pytest.raises(ArgumentsError, match="unknown argument sead; did you mean seed"):
        TrainingArguments.from_dict({"sead": 1})
