"""Let runs meet conditions of the world: quotas, full, small and slow disks, clocks, places, very many of a thing."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import failing_disk
from attack_counts import HUNG, Count, Options

LIMIT_S = 1200.0


def attack(options: Options) -> Iterator[Count]:
    """Yield what came of the runs, by condition."""
    library = failing_disk.compiled(options.folder)
    if library is None:
        print("  no C compiler, or no Linux: no quotas, slow disks and clocks here", flush=True)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else options.folder) as place:
        script = str(Path(__file__).with_name("conditions_worker.py"))
        command = [sys.executable, script, place, "quick" if options.quick else "whole"]
        environment, said = failing_disk.variables(library), options.folder / "stderr.txt"
        with (
            said.open("w") as errors,
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            limit = threading.Timer(LIMIT_S, process.kill)
            limit.start()
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                    continue
                found = json.loads(line)
                problems = [(kind, text) for kind, text in found["problems"]]
                yield Count(found["group"], found["tried"], Counter(found["ends"]), problems)
            limit.cancel()
        if process.returncode:
            count = Count("conditions: all of them")
            count.wrong(HUNG, f"their process ended with {process.returncode}: {said.read_text()[-1000:]}")
            yield count
