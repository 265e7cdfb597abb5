"""Start the script of these tests by a launcher, and read what it printed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT = HERE / "launched_run.py"
LIMIT_S = 300  # of a job: on a busy machine even importing torch takes its time
TRAINER = str(Path(sys.executable).parent / "trainer")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")


def training(folder, batch_size):
    """Return the arguments of a short run; four samples a step, whatever the number of processes."""
    numbers = ("--max_steps", "4", "--logging_steps", "1", "--learning_rate", "0.1", "--optim", "sgd")
    quiet = ("--save_strategy", "no", "--disable_tqdm")
    return ["--output_dir", str(folder), *numbers, *quiet, "--per_device_train_batch_size", str(batch_size)]


def environment(**variables):
    """Return the variables of a job: none of a launcher that the tests themselves may run under."""
    ours = ("TORCHELASTIC", "ACCELERATE", "FSDP_", "MASTER_", "SLURM_")
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours) and name not in places}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}


def start(command, cwd=None, **variables):
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_of(process):
    """Return exit code, output and errors of a job, which is killed when its time is over."""
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # a launcher passes it on; its ranks have sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors


def run(command, cwd=None, **variables):
    return end_of(start(command, cwd, **variables))


def said(output):
    """Return what ranks said, as dicts."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"')]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def seed_file(folder, name, **changes):
    """Write one of the seeds' configuration files with addresses, counts and paths changed; nothing else."""
    lines = (HERE / "seed_files" / f"{name}.yaml").read_text("utf-8").splitlines()
    for number, line in enumerate(lines):
        key = line.split(":")[0].strip()
        if key in changes:
            indent = line[: len(line) - len(line.lstrip())]
            lines[number] = f"{indent}{key}: {changes.pop(key)}"
    assert not changes, changes
    path = Path(folder, f"{name}.yaml")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path
