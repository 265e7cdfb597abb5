"""Command lines, files and variables become dataclasses."""

import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from tr_args import ArgumentParser, ArgumentsError, HfArg, HfArgumentParser, TrainingArguments, argument


class Colour(Enum):
    RED = "red"
    BLUE = 2


@dataclass
class ModelArguments:
    """Everything a dataclass of a script may hold."""

    model_name_or_path: str = field(metadata={"help": "Where the model is."})
    task_name: Optional[str] = field(default=None, metadata={"help": "100 %% of the task."})  # noqa: UP045
    max_seq_length: int = 128
    layers: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=lambda: ["a"])
    colour: Colour = Colour.RED
    size: Literal["small", 1, 2] = "small"
    shape: tuple[int, int] = (1, 1)
    cache: Path = Path("cache")
    extra: dict[str, Any] = field(default_factory=dict)
    ratio: float | None = 0.5
    pad: bool = True
    fast: bool | None = None
    lr: float = argument(default=0.1, aliases=["--lr-peak", "-l"], help="Peak.")
    kind: str = HfArg(default="x", metadata={"choices": ["x", "y"]})
    """Help under a field that has none of its own."""


@dataclass
class Plain:
    number: int = 1

    def __post_init__(self):
        if self.number > 100:
            raise ValueError("number is above 100")


def parse(*words, cls=ModelArguments):
    required = [] if any("model_name_or_path" in word for word in words) else ["--model_name_or_path", "bert"]
    (parsed,) = ArgumentParser(cls).parse_args_into_dataclasses([*required, *words] if cls is ModelArguments else words)
    return parsed


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (["--max_seq_length", "64"], "max_seq_length", 64),
        (["--max-seq-length=64"], "max_seq_length", 64),
        (["--max_seq_length", "64", "--max-seq-length", "32"], "max_seq_length", 32),
        (["--task_name", "null"], "task_name", None),
        (["--task_name", "-mrpc"], "task_name", "-mrpc"),
        (["--task_name=--mrpc"], "task_name", "--mrpc"),
        (["--task_name="], "task_name", ""),
        (["--layers", "1", "-2", "3"], "layers", [1, -2, 3]),
        (["--layers", "1,2"], "layers", [1, 2]),
        (["--layers", "[1, 2]"], "layers", [1, 2]),
        (["--layers=[]"], "layers", []),
        (["--names", "b,c", "d"], "names", ["b,c", "d"]),
        (["--names", "b"], "names", ["b"]),
        (["--colour", "blue"], "colour", Colour.BLUE),
        (["--colour", "RED"], "colour", Colour.RED),
        (["--size", "2"], "size", 2),
        (["--shape", "3", "4"], "shape", (3, 4)),
        (["--cache", "~/x"], "cache", Path.home() / "x"),
        (["--extra", '{"a": [1, null]}'], "extra", {"a": [1, None]}),
        (["--ratio", "none"], "ratio", None),
        (["--ratio", "-1e-3"], "ratio", -1e-3),
        (["--no_pad"], "pad", False),
        (["--no-pad"], "pad", False),
        (["--pad", "false"], "pad", False),
        (["--pad=0"], "pad", False),
        (["--no_pad", "--pad"], "pad", True),
        (["--fast"], "fast", True),
        (["--no-fast"], "fast", False),
        (["--lr-peak", "3"], "lr", 3.0),
        (["--lr_peak=3"], "lr", 3.0),
        (["-l", "3"], "lr", 3.0),
        (["--kind", "y"], "kind", "y"),
    ],
)
def test_words_become_values(words, name, expected):
    value = getattr(parse(*words), name)
    assert value == expected
    assert type(value) is type(expected)


def test_defaults_are_left_as_they_are():
    assert parse() == ModelArguments(model_name_or_path="bert")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "1"], "shape = '1' (command line): needs 2 values, not 1"),
        (["--layers", "1", "x"], "layers = ['1', 'x'] (command line): at 'x': needs a whole number"),
        (["--size", "3"], "size = '3' (command line): needs one of small, 1, 2"),
        (["--colour", "reed"], "colour = 'reed' (command line): needs one of red, 2; did you mean red?"),
        (["--kind", "z"], "kind = 'z' (command line): needs one of x, y"),
        (["--extra", "a=1"], "extra = 'a=1' (command line): needs a mapping, as JSON where it is text; as JSON it "
         "breaks off at character 1: Expecting value"),
        (["--max-sequence-length", "1"], "unknown argument --max-sequence-length; did you mean --max-seq-length?"),
        (["--nopad"], "unknown argument --nopad; did you mean --no_pad?"),
        (["--layers"], "--layers needs a value; one that starts with -- is written --layers=VALUE"),
    ],
)  # fmt: skip
def test_words_that_cannot_be_values_are_refused(words, message):
    with pytest.raises(ArgumentsError) as caught:
        parse(*words)
    assert str(caught.value) == message


def test_a_missing_required_argument_is_named():
    with pytest.raises(ArgumentsError, match="model_name_or_path is missing; ModelArguments needs it"):
        ArgumentParser(ModelArguments).parse_args_into_dataclasses([])


def test_an_error_of_a_dataclass_s_own_check_is_one_of_the_problems():
    with pytest.raises(ArgumentsError) as caught:
        ArgumentParser((Plain, TrainingArguments)).parse_args_into_dataclasses(["--number", "101", "--seed", "x"])
    assert [str(problem) for problem in caught.value.problems] == [
        "Plain: number is above 100",
        "seed = 'x' (command line): needs a whole number",
    ]


# --- several dataclasses, and what is left over --------------------------------------------------------------------

GLUE = (
    "--model_name_or_path google-bert/bert-base-cased --task_name mrpc --do_train --do_eval --max_seq_length 128 "
    "--per_device_train_batch_size 16 --learning_rate 5e-5 --num_train_epochs 3 --output_dir /tmp/mrpc/ "
    "--overwrite_output_dir"
)


def test_a_documented_command_line_fills_two_dataclasses():
    model, training = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses(GLUE.split())
    assert (model.task_name, model.max_seq_length) == ("mrpc", 128)
    assert (training.do_train, training.do_eval, training.overwrite_output_dir) == (True, True, True)
    assert (training.learning_rate, training.output_dir) == (5e-5, "/tmp/mrpc/")


@pytest.mark.parametrize(
    ("line", "levels"),
    [
        ("--log_level warning --log_level_replica error", ("warning", "error", True)),
        ("--log_level warning --log_level_replica error --log_on_each_node 0", ("warning", "error", False)),
        ("--log_level error --log_level_replica error --log_on_each_node 0", ("error", "error", False)),
    ],
)
def test_the_documented_logging_lines_are_read(line, levels):
    args = parse(*line.split(), cls=TrainingArguments)
    assert (args.log_level, args.log_level_replica, args.log_on_each_node) == levels


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--fsdp", "full_shard"], ["full_shard"]),
        (["--fsdp", "shard_grad_op"], ["shard_grad_op"]),
        (["--fsdp", "no_shard"], ["no_shard"]),
        (["--fsdp", "full_shard offload auto_wrap"], ["full_shard", "offload", "auto_wrap"]),
        (["--fsdp", "full_shard", "auto_wrap"], ["full_shard", "auto_wrap"]),
        (["--fsdp"], ["full_shard", "auto_wrap"]),
        (["--fsdp", "false"], []),
    ],
)
def test_the_documented_sharding_flags_are_read(line, words):
    assert parse(*line, cls=TrainingArguments).fsdp == words


def test_lists_mappings_and_former_names_work_on_the_command_line():
    line = [
        *("--report_to", "tensorboard", "wandb"),
        *("--optim_target_modules", r".*.attn.*", r".*.mlp.*"),
        *("--liger_kernel_config", '{"rope": true}'),
        *("--tf32", "--evaluation_strategy", "epoch", "--no_cuda", "--gradient_checkpointing", "--warmup-ratio", "0.1"),
    ]
    args = parse(*line, cls=TrainingArguments)
    assert args.report_to == ["tensorboard", "wandb"]
    assert args.optim_target_modules == [r".*.attn.*", r".*.mlp.*"]
    assert args.liger_kernel_config == {"rope": True}
    assert (args.tf32, args.eval_strategy, args.use_cpu) == (True, "epoch", True)
    assert (args.activation_checkpointing, args.warmup_steps) == (True, 0.1)


def test_words_that_no_flag_takes_are_returned_if_asked_for():
    parser = ArgumentParser(Plain)
    plain, rest = parser.parse_args_into_dataclasses(
        ["x", "--number", "2", "--unknown", "1", "--other=3"], return_remaining_strings=True
    )
    assert (plain.number, rest) == (2, ["x", "--unknown", "1", "--other=3"])


def test_arguments_added_by_hand_come_as_a_namespace():
    parser = ArgumentParser(Plain)
    parser.add_argument("data")
    parser.add_argument("--verbose", "-v", action="store_true")
    plain, extra = parser.parse_args_into_dataclasses(["here", "--number", "2", "-v"])
    assert (plain.number, extra.data, extra.verbose) == (2, "here", True)
    plain, extra, rest = parser.parse_args_into_dataclasses(["here", "-w"], return_remaining_strings=True)
    assert (extra.verbose, rest) == (False, ["-w"])


def test_a_list_ends_before_a_flag_that_was_added_by_hand():
    parser = ArgumentParser(TrainingArguments)
    parser.add_argument("-v", action="store_true")
    args, extra = parser.parse_args_into_dataclasses(["--report_to", "a", "b", "-v"])
    assert (args.report_to, extra.v) == (["a", "b"], True)


def test_plain_parse_args_returns_everything_in_one_namespace():
    parser = ArgumentParser((Plain, TrainingArguments))
    parser.add_argument("--mine", type=int)
    space = parser.parse_args(["--number", "2", "--mine", "3", "--bf16"])
    assert (space.number, space.mine, space.bf16, space.learning_rate) == (2, 3, True, 5e-5)


def test_two_dataclasses_cannot_have_a_field_of_the_same_name():
    @dataclass
    class Other:
        number: int = 2

    with pytest.raises(ValueError, match="the name number is in Plain and in Other; rename one of them"):
        ArgumentParser((Plain, Other))


def test_a_flag_cannot_be_added_by_hand_if_a_dataclass_has_it():
    parser = ArgumentParser(Plain)
    with pytest.raises(ValueError, match="--number is a field of Plain"):
        parser.add_argument("--number")


def test_a_field_goes_before_a_former_name_of_another_dataclass():
    @dataclass
    class Own:
        no_cuda: int = 3

    own, training = ArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses(["--no_cuda", "4"])
    assert (own.no_cuda, training.use_cpu) == (4, False)


def test_a_class_with_its_own_constructor_is_filled_through_it():
    class Fixed(TrainingArguments):
        def __init__(self, output_dir="fixed", **rest):
            super().__init__(output_dir, **rest)

    (args,) = ArgumentParser(Fixed).parse_args_into_dataclasses(["--seed", "3"])
    assert (args.output_dir, args.seed) == ("fixed", 3)


# --- as a program --------------------------------------------------------------------------------------------------

SCRIPT = """
from tr_args import ArgumentParser, TrainingArguments
(args,) = ArgumentParser(TrainingArguments, description="Trains 100 % of it.").parse_args_into_dataclasses()
print(args.seed, args.run_name)
"""


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return lambda *words: subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_wrong_command_line_ends_the_program_with_code_2_and_all_problems(run):
    done = run("--lerning_rate", "1", "--seed", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "train.py: error: 2 problems with the arguments:" in done.stderr
    assert "did you mean --learning_rate?" in done.stderr
    assert "seed = 'x' (command line): needs a whole number" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_ends_the_program_with_code_0(run):
    done = run("--seed", "1", "--help")
    assert done.returncode == 0
    assert "Trains 100 % of it." in done.stdout
    assert "--learning_rate NUMBER" in done.stdout


def test_a_file_of_arguments_beside_the_script_is_read(run, tmp_path):
    (tmp_path / "train.args").write_text("--run_name 'two words' --seed 1\n")
    assert run("--seed", "2").stdout == "2 two words\n"
