"""How a program runs on our Trainer with nothing edited, and what of its log does not depend on the machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

DROP_IN = [str(Path(sys.executable).with_name("trainer")), "drop-in"]
# Times of the clock are the machine's.
TIMES = ("_runtime", "_per_second", "step_time", "total_flos")


def logged(result):
    return [{key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in result["log"]]


def run(command, program, folder, name, *more):
    """Run one of a file's programs, and return what it wrote down."""
    words = [*command, str(program), name, str(folder), *more]
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "DISABLE_TELEMETRY": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())
