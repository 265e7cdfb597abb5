"""What reads arguments, configurations of launchers and the files of a run: parsers, files that they read, tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Literal

from fuzz_batches import Parser

from tr_args import ArgumentParser, ArgumentsError, TrainingArguments
from tr_args.testing import convert_text, read_mapping
from tr_core import TrainerState
from tr_dist.testing import described_launch, filled_configuration

YAML = b"""# a run
output_dir: out/run-1
learning_rate: 5e-5
per_device_train_batch_size: 8
num_train_epochs: 3
lr_scheduler_type: cosine
lr_scheduler_kwargs: {num_cycles: 0.5, last: [1, 2]}
report_to: [wandb, "tensorboard"]
bf16: true
fsdp: "full_shard auto_wrap"
fsdp_config:
  transformer_layer_cls_to_wrap: [Block, Layer]
  cpu_offload: no
max_time: 8h
label_names:
  - labels
  - 'other'
run_name: |
  two
  lines
"""
YAML_ANCHORS = b"""base: &base {a: 1, b: [1, 2.5, .inf]}
more: &more
  <<: *base
  b: ~
training_arguments: {seed: 7, optim_args: "a=1,b=(1, 2)"}
? text
: 0x1F
last: {<<: [*base, *more], c: 0o17}
"""
OPTIONS = {
    "output_dir": "out",
    "learning_rate": 1e-4,
    "max_steps": 100,
    "lr_scheduler_kwargs": {"num_cycles": 0.5},
    "optim_args": "betas=(0.9, 0.95)",
    "eval_strategy": "steps",
    "save_strategy": "30min",
    "label_names": ["labels"],
    "deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}},
    "accelerator_config": {"split_batches": False},
    "hub_token": None,
    "size": "small",
    "layers": [1, 2, 3],
}
TOML = b"""output_dir = "out"
learning_rate = 5e-5
max_steps = 1_000
report_to = ["wandb", 'jsonl']
run_name = '''two
lines'''
started = 2024-05-27T07:32:00Z
[lr_scheduler_kwargs]
num_cycles = 0.5
a.b.c = {d = 1, e = [1, 2]}
[[parameter_rules]]
params = "bias"
weight_decay = 0.0
"""
WORDS = b"\n".join(
    b"--output_dir out --learning-rate 5e-5 --bf16 --no_tf32 --report_to wandb jsonl --seed=7 --layers 1 2 3".split()
    + [b"--lr_scheduler_kwargs", b'{"num_cycles": 0.5, "a": [1, null]}', b"--size", b"small", b"--max_time", b"8h"]
    + [b"--optim_args", b"betas=(0.9, 0.95),eps=1e-8"]
)
ARGS_FILE = b"--output_dir 'out put' --seed 7 # first\n--bf16\n --fsdp \"full_shard auto_wrap\"\n--label_names a b\n"
ACCELERATE = b"""compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_transformer_layer_cls_to_wrap: BertLayer
dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default}
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: bf16
num_machines: 1
num_processes: 2
gpu_ids: 0,1
use_cpu: false
"""
ACCELERATE_JSON = json.dumps(
    {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 2},
        "num_processes": 4,
        "num_machines": 2,
        "main_process_ip": "host",
        "main_process_port": 1,
        "rdzv_backend": "c10d",
        "mixed_precision": "no",
    },
    indent=1,
).encode()
STATE = json.dumps(
    {"epoch": 1.0, "global_step": 5, "max_steps": 10, "log_history": [{"loss": 0.5, "step": 5}], "best_metric": None,
     "stateful_callbacks": {"TrainerControl": {"args": {"should_save": False}, "attributes": {}}},
     "is_hyper_param_search": False}
).encode()  # fmt: skip

_COMMON = (
    b"9" * 5000, b"1e400", b"-1e-400", b"0x" + b"f" * 3000, b"\x00", b"\xef\xbb\xbf", b"\xff", b"\xed\xa0\x80",
    "\u2028\u0085\u202e".encode(), b"\x1b[2J", b"x" * 5_000, b"nan", b"inf", b"~nobody/x", b"../../../../etc/passwd",
    b"https://u:p@h/x", b"hf_" + b"a" * 34, b"%s%n{0}", b"\xc2\xb2", "\u0665".encode(), b"true", b"null", b"-",
    b"--", b"=",
)  # fmt: skip
_JSON = (
    b"[" * 3000, b'{"a":' * 3000, b"]", b"}", b'"\\ud800"', b'"a": 1, "a": 2', b"Infinity", b"-NaN", b",", b":", b'"',
    b'{"a": {}}', b"[[]]", b'"\\u001b[2J"', b'"\\u0000"',
)  # fmt: skip
_YAML = (
    b"[" * 3000, b"- " * 3000, b"? " * 1000, b"{a: " * 1000, b"&a ", b"*a", b"&a [*a]", b"<<: *base",
    b"<<: [*base, *base, *base]",
    b"!!python/object/apply:os.system [id]", b"!!python/name:os.system", b"!!binary aGFsbG8=", b"!!set {a}",
    b"!!bool x", b"!!int x",
    b"!!float []", b"!!timestamp 2020-01-01", b"!!merge x", b"!x y", b"%YAML 1.1\n---\n", b"---\n", b"...\n",
    b"? [a]\n: 1\n", b"\t",
    b"|\n", b">+9\n", b"'", b'"\\x', b'"\\e[2J"', b"1:30:00", b"{[a]: 1}", b"? &k k\n", b"{<<: {<<: {a: 1}}}", b"=",
    b"`", b"@", b".inf",
)  # fmt: skip
_TOML = (
    b"a." * 3000, b"[" * 3000, b"[[a]]\n", b"[a.b]\n", b"a = {b = ", b"'''", b'"""', b"\\U00110000", b"\\ud800",
    b"1979-05-27",
    b"25:61:00", b"0xffff_", b"[a]\n[a]\n", b"a.b = 1\na.b.c = 2\n", b"{a.b = 1, a.b.c = 2}", b"1_", b"\r", b"inf",
    b"-nan",
)  # fmt: skip
_NAMES = [each.name for each in fields(TrainingArguments) if each.init]
_FLAGS = tuple(f"\n--{name}\n".encode() for name in _NAMES)
_WORDS = (
    b"\n--", b"\n--\n", b"\n", b"=", b"\n-s\n", b"\n--no_bf16\n", b"\n--no_seed\n", b"\n--lr\n",
    b"\n--learning_rat\n", b"\n--config\n",
    b"\n--config\n/dev/zero\n", b"\n--config=/\n", b"(" * 3000, b"[1,2]", b"{", b"}", b",", b"'", b"true", b"auto",
    b"1h1h", b"-5min", b"30s",
)  # fmt: skip


class WordsError(Exception):
    """Arguments were refused in these words."""


@dataclass
class Own:
    """A script's own arguments."""

    size: Literal["small", "large"] = "small"
    layers: list[int] = field(default_factory=list)
    ratio: float | None = None
    place: Path | None = None
    names: dict[str, int] = field(default_factory=dict)


def parsers() -> Iterator[Parser]:
    """Yield each parser; what it reads is written into the folder it is in."""
    json_seeds = (json.dumps(OPTIONS).encode(), json.dumps(OPTIONS, indent=2).encode())
    yield _mapping("yaml", (YAML, YAML_ANCHORS), (*_COMMON, *_YAML))
    yield _mapping("json", json_seeds, (*_COMMON, *_JSON))
    yield _mapping("toml", (TOML,), (*_COMMON, *_TOML))
    yield _files(json_seeds)
    yield _command_lines()
    yield _args_files()
    yield _values()
    yield _launchers()
    yield _deepspeed()
    yield _histories()


def _written(data: bytes, name: str) -> Path:
    path = Path(name)
    path.write_bytes(data)
    return path


def _mapping(kind: str, seeds: tuple[bytes, ...], tokens: tuple[bytes, ...]) -> Parser:
    def parse(path: Path) -> None:
        content = read_mapping(path)
        if len(repr(content)) > 10_000_000:
            raise MemoryError("what was read comes to more than it may")

    return Parser(kind.upper(), seeds, tokens, parse, lambda data, _: _written(data, f"x.{kind}"), (ArgumentsError,))


def _files(json_seeds: tuple[bytes, ...]) -> Parser:
    """Whole arguments made of files of all kinds, by turns."""
    seeds = (YAML, TOML.replace(b"started = 2024-05-27T07:32:00Z\n", b""), *json_seeds)

    def prepare(data: bytes, number: int) -> Path:
        likely = "json" if data.lstrip()[:1] == b"{" else "toml" if b" = " in data else "yaml"
        return _written(data, f"x.{likely}" if number % 10 else "x.yaml")

    def parse(path: Path) -> None:
        args = _parse(["--config", str(path)])
        str(args), args.to_json_string(), args.to_sanitized_dict()

    return Parser("arguments of files", seeds, (*_COMMON, *_YAML, *_JSON), parse, prepare, (WordsError,))


def _parse(words: list[str] | None, **options: object) -> TrainingArguments:
    try:
        return _parser().parse_args_into_dataclasses(words, **options)[0]
    except ArgumentsError as error:
        refusal = str(error)
    # A message names arguments such as skip_memory_metrics: which is not to be taken for one about memory.
    raise WordsError(refusal.replace("memory", "storage").replace("alloc", "reserv"))


@cache
def _parser() -> ArgumentParser:
    return ArgumentParser((TrainingArguments, Own), add_help=False)


def _command_lines() -> Parser:
    def prepare(data: bytes, number: int) -> list[str]:
        return data.decode("utf-8", "surrogateescape").split("\n")  # as sys.argv holds what is not UTF-8

    tokens = (*_COMMON, *_JSON, *_WORDS, *_FLAGS)
    return Parser("command lines", (WORDS,), tokens, lambda words: str(_parse(words)), prepare, (WordsError,))


def _args_files() -> Parser:
    tokens = (*_COMMON, *_WORDS, *_FLAGS, b"\\", b"'", b'"', b"#", b"\\\n")

    def parse(path: Path) -> None:
        str(_parse([], args_filename=path))

    return Parser(".args files", (ARGS_FILE,), tokens, parse, lambda data, _: _written(data, "x.args"), (WordsError,))


def _values() -> Parser:
    """Text for each field, by turns, as a command line or a variable gives it."""
    named = [(kind, each.name) for kind in (TrainingArguments, Own) for each in fields(kind) if each.init]
    texts = (
        b"1e-4",
        b"betas=(0.9, 0.95),eps=1e-8,x='a,b'",
        b'{"a": [1, {"b": null}]}',
        b"[1, 2]",
        b"wandb,jsonl",
        b"8h30min",
        b"true",
        b"full_shard auto_wrap",
    )

    def prepare(data: bytes, number: int) -> tuple[int, str]:
        return number % len(named), data.decode("utf-8", "surrogateescape")

    def parse(given: tuple[int, str]) -> None:
        convert_text(*named[given[0]], given[1])

    tokens = (*_COMMON, *_JSON, *_WORDS)
    return Parser("values of fields", texts, tokens, parse, prepare, (ArgumentsError,))


def _launchers() -> Parser:
    def parse(path: Path) -> None:
        described_launch(path)

    def prepare(data: bytes, number: int) -> Path:
        return _written(data, "x.json" if data.lstrip()[:1] == b"{" and number % 10 else "x.yaml")

    tokens = (
        *_COMMON,
        *_YAML,
        *_JSON,
        b"distributed_type: ",
        b"DEEPSPEED",
        b"MULTI_GPU",
        b"num_processes: ",
        b"no",
        b"NO",
        b"all",
    )
    return Parser("launchers' files", (ACCELERATE, ACCELERATE_JSON), tokens, parse, prepare, (ValueError,))


def _deepspeed() -> Parser:
    seed = json.dumps(OPTIONS["deepspeed"], indent=1).encode()
    return Parser(
        "DeepSpeed's files",
        (seed,),
        (*_COMMON, *_JSON),
        filled_configuration,
        lambda data, _: _written(data, "x.json"),
        (ValueError,),
    )


def _histories() -> Parser:
    """What a run wrote and a later one goes on with."""
    tokens = (*_COMMON, *_JSON, b"\n", b'"log_history": ')
    return Parser(
        "states",
        (STATE,),
        tokens,
        TrainerState.load_from_json,
        lambda data, _: _written(data, "trainer_state.json"),
        (ValueError,),
    )
