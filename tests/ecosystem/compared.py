"""How a program runs on our Trainer with nothing edited, and what of its log does not depend on the machine."""

import sys
from pathlib import Path

DROP_IN = [str(Path(sys.executable).with_name("trainer")), "drop-in"]
# Times of the clock are the machine's.
TIMES = ("_runtime", "_per_second", "step_time", "total_flos")


def logged(result):
    return [{key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in result["log"]]
