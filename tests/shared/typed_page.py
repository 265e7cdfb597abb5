"""Do what a page of the documentation says: write its files, and type its commands."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

# A block that is a file says so in the line before it: `train.py`:
FILE = re.compile(r"`([\w.]+)`:\n\n```(?:python|yaml|json)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)


# Pages whose commands test_typed_commands.py types in a folder that has what they speak of.
TYPED_ELSEWHERE = (
    "tr-all/README",
    "tr-all/docs/how-to/fsdp-deepspeed",
    "tr-all/docs/how-to/several-machines",
    "tr-all/docs/how-to/troubleshooting",
    "tr-ckpt/README",
    "tr-core/docs/check-codes",
    "tr-core/docs/throughput",
    "tr-dist/README",
    "tr-log/README",
)


def environment():
    """Return the environment of a user of this interpreter's commands, who has neither a GPU nor a network."""
    own = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def free_port():
    """Return the number of a port that no process listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def type_page(page, folder):
    """Write the files of a page to an empty folder, and run all of its commands there but those that install."""
    text = page.read_text("utf-8")
    port = free_port()
    for file, content in FILE.findall(text):
        (folder / file).write_text(content.replace("8000", port), "utf-8")
    typed = [line for block in COMMANDS.findall(text) for line in block.splitlines() if not line.startswith("pip ")]
    script = "\n".join(["set -e", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *typed]).replace("8000", port)
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment(), capture_output=True, text=True, timeout=560, check=False
    )
