"""One of several processes of which the main one cooks and the others eat; prints how it went.

Usage: cook_together.py FOLDER cook|fail|absent
"""

import sys
import time
from pathlib import Path

from tr_args import TrainingArguments


def take_part(folder: Path, behaviour: str) -> None:
    args = TrainingArguments(str(folder / "out"), ddp_timeout=1 if behaviour == "absent" else 30)
    is_main = args.process_index == 0
    if is_main and behaviour == "absent":
        return
    for number in range(1 if behaviour == "absent" else 2):
        meal = folder / f"meal-{number}"
        with args.main_process_first(desc="cooking"):
            if not is_main:
                assert meal.read_text() == "ready"
                continue
            time.sleep(0.3)
            if behaviour == "fail":
                raise KeyError("no salt")
            meal.write_text("ready")


if __name__ == "__main__":
    outcome = "done"
    try:
        take_part(Path(sys.argv[1]), sys.argv[2])
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(outcome)
