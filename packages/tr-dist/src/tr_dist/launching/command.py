"""Start a script or module in several processes, here and on other machines."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from tr_dist.launching.accelerate_file import FileSettings, interpret, read_file
from tr_dist.launching.launch import Launch, LaunchError, visible_devices
from tr_log.masking import mask_secrets
from tr_log.streams import flush_streams

_USAGE_ERROR = 2
_DESCRIPTION = """Start a script in several processes, here and on other machines, and restart them if asked.

The processes get the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). Precision, sharding
and the like of a configuration file reach the script as `accelerate launch` passes them on, and fill the training
arguments that the script's own command line leaves at their defaults."""
_EPILOG = """examples:
  trainer launch --nproc 2 train.py --learning_rate 1e-4
  trainer launch --devices 2,0 train.py                       physical GPU 2 is cuda:0, GPU 0 is cuda:1
  trainer launch --config_file default_config.yaml train.py   a file of accelerate config, or of trainer config
  trainer launch --nnodes 2 --node_rank 0 --master_addr 10.0.0.1 --master_port 29500 --nproc 8 train.py
  trainer launch --nnodes 1:4 --rdzv_endpoint 10.0.0.1:29500 --rdzv_id job7 --max_restarts 3 -m package.train

exit code: 0, or that of the rank that failed first (128 + the number of a signal that ended it). Ctrl-C, SIGTERM,
SIGHUP and SIGUSR1 are passed on once, so that a run can save; then it is 130, 143, ... A second one ends at once."""


def main(argv: list[str]) -> int:
    """Start the job of the command line and the file.

    Args:
        argv: the command line after the command's name.

    Returns:
        The job's exit code; 2 if it could not be started.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        launch, notes = plan(options)
        for note in notes:
            print(mask_secrets(f"trainer launch: {options.config_file}: {note}"), file=sys.stderr)
        if options.dry_run:
            print(launch.described())
            return 0
        if launch.is_plain:
            _exec(launch)
        if launch.goes_on:
            from tr_dist.launching.elastic import run_elastic

            return run_elastic(launch)
        from tr_dist.launching.agent import run  # the elastic agent is large, and a single process does not need it

        return run(launch)
    except LaunchError as error:
        print(f"trainer launch: {error}", file=sys.stderr)
        return _USAGE_ERROR


def plan(options: argparse.Namespace) -> tuple[Launch, list[str]]:
    """Return the job to start, and the notes about keys of the file without effect.

    The command line takes precedence over the file.

    Raises:
        LaunchError: the job cannot be started.
    """
    if not options.module and not os.path.exists(options.script):
        raise LaunchError(f"there is no script {options.script} here; for a module's name give -m before it")
    settings = FileSettings()
    if options.config_file is not None:
        settings = interpret(read_file(options.config_file), options.config_file)
    devices = settings.devices if options.devices is None else options.devices
    variables = dict(settings.variables)
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible_devices(devices)
        if not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & set(os.environ):
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the numbers are nvidia-smi's, also where GPUs differ
    nproc = _nproc(options, settings, variables)
    if nproc > 1 and "ACCELERATE_USE_CPU" not in os.environ and not _has_accelerator(variables):
        # Without them a script for accelerate.Accelerator would silently train alone in each process.
        variables.setdefault("ACCELERATE_USE_CPU", "true")
    launch = Launch(
        command=(options.script, *options.arguments),
        is_module=options.module,
        nproc=nproc,
        max_restarts=options.max_restarts,
        log_dir=options.log_dir,
        stop_timeout_s=options.stop_timeout,
        goes_on=options.elastic,
        variables=variables,
        rdzv_conf=_pairs(options.rdzv_conf),
        **_nodes(options, settings),
    )
    return launch, settings.notes


def _nproc(options: argparse.Namespace, settings: FileSettings, variables: dict[str, str]) -> int:
    on_cpu = variables.get("ACCELERATE_USE_CPU") == "true"
    available = 0 if on_cpu else _num_devices(variables)
    if options.nproc in (None, "auto"):
        return settings.nproc if settings.nproc and options.nproc is None else max(1, available)
    if not options.nproc.isdigit():
        raise LaunchError(f"--nproc {options.nproc} is neither a number of processes nor auto, which is one for a GPU")
    wanted = int(options.nproc)
    if available and wanted > available:
        raise LaunchError(
            f"--nproc {wanted} on a machine with {available} visible GPU(s), and each process needs its own; start "
            f"{available}, or hide them with --devices '' to compute on the CPU"
        )
    return wanted


def _num_devices(variables: dict[str, str]) -> int:
    """Return how many CUDA devices the processes will see."""
    import torch  # late, so that a mistyped command is refused at once

    if "CUDA_VISIBLE_DEVICES" in variables:
        listed = len([name for name in variables["CUDA_VISIBLE_DEVICES"].split(",") if name])
        return listed if torch.cuda.is_available() else 0
    return torch.cuda.device_count()


def _has_accelerator(variables: dict[str, str]) -> bool:
    import torch  # late, so that a mistyped command is refused at once

    return _num_devices(variables) > 0 or (torch.accelerator.is_available() and not torch.cuda.is_available())


def _nodes(options: argparse.Namespace, settings: FileSettings) -> dict[str, Any]:
    """Return the fields for the machines and where they meet."""
    least, most = _range(options.nnodes) if options.nnodes else (settings.nnodes, settings.nnodes)
    if options.rdzv_endpoint or options.rdzv_id:
        return _by_arrival(options, least, most)
    host = options.master_addr or settings.host
    port = options.master_port if options.master_port is not None else settings.port
    rank = options.node_rank if options.node_rank is not None else settings.node_rank
    if most == 1:
        if rank:
            raise LaunchError(f"machine {rank} of 1 does not exist; give --nnodes, or leave out --node_rank")
        # Without a port a free one is used. A file's address is ignored for one machine.
        return {"endpoint": f"{options.master_addr or 'localhost'}:{port or 0}"}
    if host is None or port is None:
        return {"min_nodes": least, "max_nodes": most}
    numbered = {} if settings.by_arrival and options.node_rank is None else {"node_rank": rank}
    return {"min_nodes": least, "max_nodes": most, "endpoint": f"{host}:{port}", **numbered}


def _by_arrival(options: argparse.Namespace, least: int, most: int) -> dict[str, Any]:
    if options.node_rank is not None or options.master_addr or options.master_port:
        raise LaunchError(
            "--rdzv_endpoint and --rdzv_id number machines as they come, --node_rank, --master_addr and --master_port "
            "do it by hand; give one kind"
        )
    if not (options.rdzv_endpoint and options.rdzv_id):
        raise LaunchError("--rdzv_endpoint HOST:PORT and --rdzv_id NAME go together; give both")
    place = {"endpoint": options.rdzv_endpoint, "rdzv_id": options.rdzv_id}
    return {"min_nodes": least, "max_nodes": most, **place}


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not first.isdigit() or (last and not last.isdigit()):
        raise LaunchError(f"--nnodes {text} is neither a number of machines nor MIN:MAX")
    return int(first), int(last or first)


def _pairs(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise LaunchError(f"--rdzv_conf: {wrong[0]!r} is not NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _exec(launch: Launch) -> None:
    """Replace this process by the script: a single process needs no launcher between it and its signals."""
    words = [*(["-m"] if launch.is_module else []), *launch.command]
    os.environ.update(launch.variables)
    flush_streams()
    os.execv(sys.executable, [sys.executable, *words])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer launch",
        usage="trainer launch [OPTION ...] [-m] SCRIPT [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(*names: str, **settings: Any) -> None:
        shown = parser.add_argument(names[0], **settings)
        # Other spellings are accepted, and hidden to keep the help short.
        dashed = ["--" + name[2:].replace("_", "-") for name in names]
        others = [name for name in dict.fromkeys([*names[1:], *dashed]) if name != names[0]]
        if others:
            hidden = {"dest": shown.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(*others, **{**settings, **hidden})

    add("--config_file", metavar="FILE", help="YAML or JSON file of accelerate config or trainer config")
    add("--nproc", "--nproc_per_node", metavar="N", help="processes on this machine; without: one for each visible GPU")
    add("--devices", metavar="LIST", help="GPUs to use, in this order, such as 2,0; '' for none")
    add("--nnodes", metavar="N|MIN:MAX", help="machines; MIN:MAX lets them come and go")
    add("--node_rank", metavar="R", type=int, help="number of this machine, from 0")
    add("--master_addr", metavar="HOST", help="machine 0, where all meet")
    add("--master_port", metavar="PORT", type=int, help="a free port of it")
    add("--rdzv_endpoint", metavar="HOST:PORT", help="where machines meet that are numbered as they come")
    add("--rdzv_id", metavar="NAME", help="name of the job at that place")
    add("--rdzv_conf", metavar="NAME=VALUE,...", default="", help="further settings of torch's rendezvous")
    add(
        "--max_restarts",
        metavar="N",
        type=int,
        default=0,
        help="start all ranks again up to N times (default 0); with --elastic, those that failed",
    )
    text = "go on with the processes that are left if one fails, and take it in again once it was restarted; for a run "
    add("--elastic", action="store_true", help=text + "with elastic='bitwise' on one machine (see the page launching)")
    add("--log_dir", metavar="FOLDER", help="write the output of rank N to FOLDER/rank_N.log")
    text = "time to save and end after a signal, before ranks are killed (default 300)"
    add("--stop_timeout", metavar="SECONDS", type=float, default=300.0, help=text)
    add("--dry_run", action="store_true", help="print what would be started, and start nothing")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="what to run")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="its arguments")
    return parser
