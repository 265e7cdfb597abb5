"""Write a configuration file for `trainer launch` and `accelerate launch`, from questions or from flags."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tr_dist.launching.accelerate_file import PRECISIONS, TYPES, interpret
from tr_dist.launching.launch import LaunchError

_USAGE_ERROR = 2
_YES_NO = ("yes", "no")
_TRUTHS = {"yes": True, "no": False}
_Answers = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One question of the command.

    Attributes:
        key: the key in the file; a dotted one is in a section.
        text: the question.
        default: the answer for an empty line.
        choices: the valid answers; empty for any text, or for a number if the default is one.
        applies: whether to ask it, given the answers so far.
    """

    key: str
    text: str
    default: Any
    choices: tuple[str, ...] = ()
    applies: Callable[[_Answers], bool] = lambda answers: True

    @property
    def flag(self) -> str:
        """The command line's flag for this question."""
        return "--" + self.key.rpartition(".")[2]


def _is(key: str, *values: Any) -> Callable[[_Answers], bool]:
    """Return whether a question was asked and has one of these answers."""
    return lambda answers: answers.get(key) in values


def _is_of_several_machines(answers: _Answers) -> bool:
    return answers["num_machines"] > 1


_SHARDS, _USES_DEEPSPEED = _is("distributed_type", "FSDP"), _is("distributed_type", "DEEPSPEED")
_BUILDS_ZERO = _is("deepspeed_config.deepspeed_config_file", "")
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
QUESTIONS = (
    Question("distributed_type", "How shall processes share the work", "MULTI_GPU", TYPES),
    Question("num_machines", "How many machines", 1, (), lambda a: a["distributed_type"] not in ("NO", "XLA")),
    Question("machine_rank", "Number of this machine, from 0", 0, (), _is_of_several_machines),
    Question("main_process_ip", "Address of machine 0", "127.0.0.1", (), _is_of_several_machines),
    Question("main_process_port", "Free port of machine 0", 29500, (), _is_of_several_machines),
    Question("num_processes", "How many processes on all machines together", 2),
    Question("gpu_ids", "Which GPUs, such as 2,0", "all", (), _is("distributed_type", "MULTI_GPU")),
    Question("mixed_precision", "Precision of the computation", "no", PRECISIONS),
    Question("fsdp_config.fsdp_sharding_strategy", "What is sharded", "FULL_SHARD", _SHARDING, _SHARDS),
    Question("fsdp_config.fsdp_auto_wrap_policy", "How units are found", "TRANSFORMER_BASED_WRAP", _POLICIES, _SHARDS),
    Question(
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "Names of the layers' classes, with commas; empty for what the model says",
        "",
        (),
        _is("fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    ),
    Question(
        "fsdp_config.fsdp_min_num_params",
        "Parameters that make a unit",
        100_000_000,
        (),
        _is("fsdp_config.fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
    ),
    Question("fsdp_config.fsdp_offload_params", "Keep shards in host memory", "no", _YES_NO, _SHARDS),
    Question(
        "deepspeed_config.deepspeed_config_file", "DeepSpeed's JSON file; empty for none", "", (), _USES_DEEPSPEED
    ),
    Question("deepspeed_config.zero_stage", "ZeRO stage, 0 to 3", 2, (), _BUILDS_ZERO),
    Question(
        "deepspeed_config.offload_optimizer_device",
        "Where optimizer state is kept, if not on the GPU",
        "none",
        ("none", "cpu"),
        _BUILDS_ZERO,
    ),
    Question("deepspeed_config.gradient_accumulation_steps", "Micro-batches in a step", 1, (), _BUILDS_ZERO),
)


def main(argv: list[str]) -> int:
    """Ask what the command line leaves open, and write the file.

    Args:
        argv: the command line after the command's name.

    Returns:
        0, or 2 if an answer is invalid.
    """
    options = _parser().parse_args(argv)
    asks = not options.defaults and sys.stdin.isatty()
    try:
        content = answered({key: value for key, value in vars(options).items() if value is not None}, asks=asks)
        interpret(content, "what was answered")
        _write(Path(options.config_file).expanduser(), content, overwrite=options.overwrite)
    except LaunchError as error:
        print(f"trainer config: {error}", file=sys.stderr)
        return _USAGE_ERROR
    print(f"written: {options.config_file}; start with: trainer launch --config_file {options.config_file} SCRIPT")
    return 0


def answered(given: _Answers, *, asks: bool, ask: Callable[[str], str] = input) -> dict[str, Any]:
    """Return the mapping of the file.

    Args:
        given: answers by flag, without dashes.
        asks: ask for the others; otherwise they have their defaults.
        ask: asks a question and returns the typed answer.

    Raises:
        LaunchError: an answer is not among the choices, or belongs to no question that applies.
    """
    answers: _Answers = {"num_machines": 1}
    for question in QUESTIONS:
        name = question.flag[2:]
        if not question.applies(answers):
            if name in given:
                raise LaunchError(f"{question.flag} has no effect with distributed_type: {answers['distributed_type']}")
            continue
        if name in given:
            answers[question.key] = _value(question, str(given[name]))
        elif asks:
            answers[question.key] = _asked(question, ask)
        else:
            alone = question.key == "num_processes" and answers["distributed_type"] in ("NO", "XLA")
            answers[question.key] = 1 if alone else _value(question, str(question.default))
    return _content(answers)


def _asked(question: Question, ask: Callable[[str], str]) -> Any:
    choices = f" ({', '.join(question.choices)})" if question.choices else ""
    while True:
        typed = ask(f"{question.text}{choices} [{question.default}]: ").strip()
        try:
            return _value(question, typed or str(question.default))
        except LaunchError as error:
            print(error)


def _value(question: Question, text: str) -> Any:
    if question.choices == _YES_NO:
        if text.lower() not in _TRUTHS:
            raise LaunchError(f"{question.flag} {text}: answer yes or no")
        return _TRUTHS[text.lower()]
    if question.choices:
        for choice in question.choices:
            if text.lower() == choice.lower():
                return choice
        raise LaunchError(f"{question.flag} {text} is not one of {', '.join(question.choices)}")
    if isinstance(question.default, int):
        if not text.isdigit():
            raise LaunchError(f"{question.flag} {text} is not a whole number")
        return int(text)
    return text


def _content(answers: _Answers) -> dict[str, Any]:
    kind = answers["distributed_type"]
    content: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    for key, value in answers.items():
        section, _, name = key.rpartition(".")
        if value == "" or (name == "offload_optimizer_device" and value == "none"):
            continue
        (content.setdefault(section, {}) if section else content)[name] = value
    content |= {"machine_rank": content.get("machine_rank", 0), "main_training_function": "main"}
    content |= {"rdzv_backend": "static", "same_network": True, "use_cpu": kind == "MULTI_CPU"}
    return dict(sorted(content.items()))


def _write(path: Path, content: dict[str, Any], *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise LaunchError(f"{path} exists; name another file, or say --overwrite")
    text = json.dumps(content, indent=2) + "\n" if path.suffix == ".json" else "".join(_lines(content))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}") from None


def _lines(content: dict[str, Any], indent: str = "") -> list[str]:
    """Return lines of YAML; text is quoted, so that no parser reads `no` as false."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:\n", *_lines(value, indent + "  ")]
        else:
            is_word = isinstance(value, str) and value.replace("_", "").isalpha() and value.lower() not in _YES_NO
            lines.append(f"{indent}{key}: {value if is_word else json.dumps(value)}\n")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer config",
        description="Ask how a job is to be started and write the file that trainer launch and accelerate launch read. "
        "What a flag says is not asked.",
        allow_abbrev=False,
    )
    parser.add_argument("--config_file", default="default_config.yaml", metavar="FILE", help="where (.yaml or .json)")
    parser.add_argument("--defaults", action="store_true", help="ask nothing; what no flag says has its default")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    for question in QUESTIONS:
        choices = f": {', '.join(question.choices)}" if question.choices else ""
        text = f"{question.text[0].lower()}{question.text[1:]}{choices} (default {question.default!r})"
        parser.add_argument(question.flag, metavar="VALUE", help=text)
    return parser
