"""Read Accelerate's configuration files: translate each key, and refuse unsupported ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tr_dist.launching.accelerate_plugins import (
    deepspeed_variables,
    dynamo_variables,
    fsdp_variables,
    parallelism_variables,
)
from tr_dist.launching.launch import LaunchError
from tr_log.bounded_text import MOST_BYTES, MOST_YAML_BYTES, BoundedYaml, ContentError, load_json, read_text

_LONGEST_WORDS = 300  # of a library's message
TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "XLA")
PRECISIONS = ("no", "fp16", "bf16")
# No effect on the processes that this launcher starts. key -> the reason, shown when it is set
_WITHOUT_EFFECT = {
    "main_training_function": "",  # read if a launcher imports the script; present in every file
    "same_network": "",  # machines meet at main_process_ip in either case
    "tpu_env": "is for starting other machines of a pod",
    "tpu_vm": "is for starting other machines of a pod",
    "tpu_use_cluster": "is for starting other machines of a pod",
    "tpu_use_sudo": "is for starting other machines of a pod",
    "tpu_name": "is for starting other machines of a pod",
    "tpu_zone": "is for starting other machines of a pod",
    "command_file": "is for starting other machines of a pod",
    "commands": "is for starting other machines of a pod",
    "enable_cpu_affinity": "binds processes to cores; numactl or the scheduler does that",
    "ipex_config": "is for a library that this launcher does not know",
}
_REFUSED = {
    "megatron_lm_config": "Megatron-LM has a training loop of its own; use FSDP or DEEPSPEED",
    "fp8_config": "there is no training in 8 bits; use mixed_precision: bf16",
    "mpirun_config": "processes are started here, not by mpirun; use distributed_type: MULTI_CPU without it",
    "fp16": "is a key of former versions; write mixed_precision: fp16",
    "dynamo_backend": "is a key of former versions; write it into dynamo_config",
}
_ACTING = {
    *("compute_environment", "distributed_type", "num_processes", "num_machines", "machine_rank", "debug"),
    *("main_process_ip", "main_process_port", "mixed_precision", "use_cpu", "gpu_ids", "rdzv_backend"),
    *("fsdp_config", "deepspeed_config", "dynamo_config", "parallelism_config", "downcast_bf16"),
}


@dataclass
class FileSettings:
    """The settings of a file, in the launcher's terms; None if it does not set one.

    Attributes:
        nproc: number of processes on each machine.
        nnodes: number of machines.
        node_rank: number of this machine.
        host: where the machines meet.
        port: its port.
        by_arrival: machines are numbered in the order they arrive (`rdzv_backend: c10d`).
        devices: the value of `CUDA_VISIBLE_DEVICES`.
        variables: environment variables for the script, named as `accelerate launch` names them.
        notes: keys that have no effect, and why.
    """

    nproc: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    host: str | None = None
    port: int | None = None
    by_arrival: bool = False
    devices: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_file(path: str) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file.

    Raises:
        LaunchError: it cannot be read, or PyYAML is not installed.
    """
    is_json = path.endswith(".json")
    try:
        text = read_text(path, MOST_BYTES if is_json else MOST_YAML_BYTES)
        content = load_json(text) if is_json else _yaml(path, text)
    except ContentError as error:
        raise LaunchError(f"--config_file {path} {error}") from None
    if not isinstance(content, dict):
        raise LaunchError(f"--config_file {path} holds {type(content).__name__}; it must hold `key: value` lines")
    return content


def _yaml(path: str, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise LaunchError(
            f"reading {path} needs PyYAML: pip install 'tr-dist[yaml]', or write the file as JSON"
        ) from None
    try:
        return yaml.load(text, Loader=_bounded(yaml.SafeLoader))
    except ContentError:
        raise
    except (LookupError, AttributeError):  # raised by PyYAML if a tag such as !!bool precedes another value
        raise ContentError("is not valid YAML: a tag and its value do not go together; leave the tag out") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ContentError(f"is not valid YAML: {' '.join(str(error).split())[:_LONGEST_WORDS]}") from None


def _bounded(loader: Any) -> Any:
    """Return PyYAML's loader with limits; it reads plain scalars as Accelerate does."""
    return type("BoundedLoader", (BoundedYaml, loader), {"tags": BoundedYaml.tags | {"timestamp", "value"}})


def interpret(content: Mapping[str, Any], name: str) -> FileSettings:
    """Return the settings of a file's mapping.

    Args:
        content: the result of `read_file`.
        name: the file, for messages.

    Raises:
        LaunchError: lists every key that is unknown, refused or contradicts another.
    """
    problems: list[str] = []
    settings = FileSettings()
    known = {*_ACTING, *_WITHOUT_EFFECT, *_REFUSED}
    problems += [
        f"{key}: is not a key of Accelerate's files that is known here{_hint(key, known)}"
        for key in content
        if key not in known
    ]
    problems += [f"{key}: {reason}" for key, reason in _REFUSED.items() if content.get(key)]
    settings.notes += [
        f"{key} {reason}; it has no effect"
        for key, reason in _WITHOUT_EFFECT.items()
        if reason and content.get(key) not in (None, False, [], "", {})
    ]
    for read in (_kind, _processes, _meeting, _precision, _devices, _rest):
        _collecting(problems, read, content, settings)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
        raise LaunchError(f"{name} cannot be used:\n{listed}")
    return settings


def _hint(key: Any, known: set[str]) -> str:
    close = get_close_matches(str(key), sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


_Reader = Callable[[Mapping[str, Any], FileSettings], None]


def _collecting(problems: list[str], read: _Reader, content: Mapping[str, Any], settings: FileSettings) -> None:
    try:
        read(content, settings)
    except LaunchError as error:
        problems.append(str(error))


def _kind(content: Mapping[str, Any], settings: FileSettings) -> None:
    where = content.get("compute_environment", "LOCAL_MACHINE")
    if where != "LOCAL_MACHINE":
        raise LaunchError(f"compute_environment: {where} is started by its own tools; this starts LOCAL_MACHINE")
    kind = _type_of(content)
    if kind == "FSDP":
        settings.variables |= fsdp_variables(_mapping(content, "fsdp_config"))
        if settings.variables.get("FSDP_VERSION") == "1":
            settings.notes.append("fsdp_version: 1, torch's former FSDP, is not offered; the job shards by FSDP2")
    if kind == "DEEPSPEED":
        settings.variables |= deepspeed_variables(_mapping(content, "deepspeed_config"))
    if spread := _mapping(content, "parallelism_config"):
        total = _number(content, "num_processes", -1, low=-1)
        settings.variables |= parallelism_variables(spread, kind, total)
    for key, needed in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if content.get(key) and kind != needed:
            raise LaunchError(f"{key}: needs distributed_type: {needed}, not {kind}; change one, or leave it out")


def _type_of(content: Mapping[str, Any]) -> str:
    given = content.get("distributed_type", "NO")
    # YAML reads an unquoted NO as false.
    kind = "NO" if given in (False, None) else str(given).upper()
    kind = "XLA" if kind in ("TPU", "XLA_TPU", "XLA_GPU") else kind
    kind = "NO" if kind == "MPS" else kind  # one process, which selects the Mac's GPU
    if kind not in TYPES:
        raise LaunchError(
            f"distributed_type: {given} cannot be started here; it is one of {', '.join(TYPES)} (accelerate launch "
            "starts processes on other devices, for which there is strategy='accelerate')"
        )
    return kind


def _processes(content: Mapping[str, Any], settings: FileSettings) -> None:
    kind, machines = _type_of(content), _number(content, "num_machines", 1, low=1)
    total = _number(content, "num_processes", -1, low=-1)
    settings.nnodes, settings.node_rank = machines, _number(content, "machine_rank", 0)
    if total > 0 and total % machines:
        raise LaunchError(
            f"num_processes: {total} counts the processes of all machines, and num_machines: {machines} does not "
            f"divide it; give a multiple of {machines}"
        )
    settings.nproc = total // machines if total > 0 else None
    if kind in ("NO", "XLA") and total > 1:
        instead = "MULTI_GPU or MULTI_CPU" if kind == "NO" else "1, and torch_xla.launch in the script"
        raise LaunchError(f"num_processes: {total} with distributed_type: {kind}, which is one process; use {instead}")
    if kind in ("NO", "XLA"):
        settings.nproc = 1
    if kind == "MULTI_CPU" or _truth(content, "use_cpu"):
        settings.variables["ACCELERATE_USE_CPU"] = "true"


def _meeting(content: Mapping[str, Any], settings: FileSettings) -> None:
    backend = content.get("rdzv_backend") or "static"
    if backend not in ("static", "c10d"):
        raise LaunchError(f"rdzv_backend: {backend} is not static (machines have numbers) or c10d (they come and go)")
    settings.host = content.get("main_process_ip")
    if content.get("main_process_port") is not None:
        settings.port = _number(content, "main_process_port", 0, high=65535)
    machines = _number(content, "num_machines", 1, low=1)
    settings.by_arrival = backend == "c10d" and machines > 1
    if machines > 1 and (settings.host is None or not settings.port):
        raise LaunchError(f"num_machines: {machines} needs main_process_ip and main_process_port, where they meet")


def _precision(content: Mapping[str, Any], settings: FileSettings) -> None:
    given = content.get("mixed_precision")
    if given is None:
        return
    # YAML reads an unquoted no as false.
    precision = "no" if given is False else str(given).lower()
    if precision not in PRECISIONS:
        raise LaunchError(f"mixed_precision: {given} is not supported; it is one of {', '.join(PRECISIONS)}")
    settings.variables["ACCELERATE_MIXED_PRECISION"] = precision


def _devices(content: Mapping[str, Any], settings: FileSettings) -> None:
    given = content.get("gpu_ids")
    if given is not None and str(given) != "all":
        settings.devices = ",".join(map(str, given)) if isinstance(given, list) else str(given)


def _rest(content: Mapping[str, Any], settings: FileSettings) -> None:
    settings.variables |= dynamo_variables(_mapping(content, "dynamo_config"))
    if _truth(content, "debug"):
        settings.variables["ACCELERATE_DEBUG_MODE"] = "true"
    if _truth(content, "downcast_bf16"):
        if _type_of(content) == "XLA":
            settings.variables["XLA_DOWNCAST_BF16"] = "1"
        else:
            settings.notes.append("downcast_bf16 is for XLA; it has no effect")


def _mapping(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise LaunchError(f"{key}: holds {value!r}; it must hold indented `key: value` lines")
    return value


def _truth(content: Mapping[str, Any], key: str) -> bool:
    value = content.get(key, False)
    if isinstance(value, bool) or value is None:
        return bool(value)
    if str(value).lower() in ("yes", "true", "no", "false"):
        return str(value).lower() in ("yes", "true")
    raise LaunchError(f"{key}: {value!r} is neither true nor false")


def _number(content: Mapping[str, Any], key: str, default: int, *, low: int = 0, high: int | None = None) -> int:
    value = content.get(key)
    if value is None:
        return default
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise LaunchError(f"{key}: {value!r} is not a whole number") from None
    if number < low or (high is not None and number > high):
        raise LaunchError(f"{key}: {number} is out of range; it must be {low}{f' to {high}' if high else ' or more'}")
    return number
