"""Values from files, variables and mappings, and which of them win."""

from dataclasses import dataclass

import pytest

from tr_args import ArgumentParser, ArgumentsError, TrainingArguments


@dataclass
class Plain:
    number: int = 1


def parse(*words):
    (parsed,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    return parsed


FILES = {
    "run.yaml": "learning_rate: 5e-5\nbf16: 'false'\neval-strategy: no\nreport_to: [tensorboard, wandb]\n"
    "training_arguments:\n  seed: 7\nnumber: 3\nlr_scheduler_kwargs: {num_cycles: 2}\n",
    "run.toml": 'learning_rate = 5e-5\nbf16 = "false"\neval_strategy = "no"\nreport_to = ["tensorboard", "wandb"]\n'
    "number = 3\n[TrainingArguments]\nseed = 7\n[lr_scheduler_kwargs]\nnum_cycles = 2\n",
    "run.json": '{"learning_rate": "5e-5", "bf16": "false", "eval_strategy": "no", "report_to": "tensorboard,wandb",'
    ' "number": 3, "seed": 7, "lr_scheduler_kwargs": {"num_cycles": 2}}',
}


@pytest.fixture
def files(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_the_same_values_in_every_format(files, name):
    parser = ArgumentParser((Plain, TrainingArguments))
    read = {"run.yaml": parser.parse_yaml_file, "run.toml": parser.parse_toml_file, "run.json": parser.parse_json_file}
    for plain, args in (
        read[name](files / name),
        parser.parse_args_into_dataclasses(["--config", str(files / name)]),
    ):
        assert plain.number == 3
        assert (args.learning_rate, args.bf16, args.eval_strategy, args.seed) == (5e-5, False, "no", 7)
        assert (args.report_to, args.lr_scheduler_kwargs) == (["tensorboard", "wandb"], {"num_cycles": 2})
        assert args.origin("seed") == f"file {files / name}"


def test_the_command_line_goes_before_variables_and_those_before_files(files, monkeypatch):
    monkeypatch.setenv("TR_SEED", "8")
    monkeypatch.setenv("TR_NUMBER", "4")
    monkeypatch.setenv("SEED", "9")
    parser = ArgumentParser((Plain, TrainingArguments), env_prefix="TR_")
    plain, args = parser.parse_args_into_dataclasses(["--number=5", "--config", str(files / "run.yaml")])
    assert (plain.number, args.seed, args.learning_rate) == (5, 8, 5e-5)
    assert parser.origins["number"] == "command line"
    assert parser.origins["seed"] == args.origin("seed") == "environment TR_SEED"
    assert args.origin("learning_rate") == f"file {files / 'run.yaml'}"
    assert args.origin("max_steps") == "default"


def test_two_variables_for_one_argument_must_agree(monkeypatch):
    monkeypatch.setenv("TR_EVAL_STRATEGY", "epoch")
    monkeypatch.setenv("TR_EVALUATION_STRATEGY", "steps")
    with pytest.raises(ArgumentsError, match=r"environment TR_EVAL_STRATEGY\) and .*environment TR_EVALUATION_ST"):
        ArgumentParser(TrainingArguments, env_prefix="TR_").parse_args_into_dataclasses([])


def test_variables_are_read_only_where_they_are_asked_for(monkeypatch):
    monkeypatch.setenv("TR_SEED", "8")
    assert parse().seed == 42


def test_a_later_file_goes_before_an_earlier_one_and_may_use_a_former_name(files):
    (files / "more.yaml").write_text("seed: 1\nevaluation_strategy: epoch\n")
    words = ["--config", str(files / "run.yaml"), f"--config={files / 'more.yaml'}", "--number", "1"]
    _, args = ArgumentParser((Plain, TrainingArguments)).parse_args_into_dataclasses(words)
    assert (args.seed, args.eval_strategy) == (1, "epoch")
    _, args = ArgumentParser((Plain, TrainingArguments)).parse_args_into_dataclasses([*words, "--eval_strategy", "no"])
    assert args.eval_strategy == "no"


def test_a_dataclass_may_have_a_field_called_config():
    @dataclass
    class Own:
        config: str = "none"

    (own,) = ArgumentParser(Own).parse_args_into_dataclasses(["--config", "x"])
    assert own.config == "x"


def test_a_file_of_arguments_has_quotes_and_comments(tmp_path):
    path = tmp_path / "run.args"
    path.write_text("# what this is\n--run_name 'two words'  # and why\n--seed 3\n")
    parser = ArgumentParser(TrainingArguments)
    for read in (
        parser.parse_args_into_dataclasses(["--seed", "4"], args_filename=path),
        parser.parse_args_into_dataclasses(["--args_file", str(path), "--seed", "4"], args_file_flag="--args_file"),
        parser.parse_args_into_dataclasses([f"--args_file={path}", "--seed", "4"], args_file_flag="--args_file"),
    ):
        assert (read[0].run_name, read[0].seed) == ("two words", 4)
        assert read[0].origin("run_name") == f"file {path}"


def test_a_mapping_of_values_is_parsed_and_unknown_keys_are_refused_or_left_out():
    parser = ArgumentParser((Plain, TrainingArguments))
    values = {"number": "3", "learning-rate": "1e-3", "colour": "red"}
    with pytest.raises(ArgumentsError, match="unknown argument colour"):
        parser.parse_dict(values)
    plain, args = parser.parse_dict(values, allow_extra_keys=True)
    assert (plain.number, args.learning_rate) == (3, 1e-3)


def test_a_missing_file_of_arguments_is_named(tmp_path):
    with pytest.raises(ArgumentsError, match=r"file .*none\.args: does not exist"):
        ArgumentParser(Plain).parse_args_into_dataclasses([], args_filename=tmp_path / "none.args")
