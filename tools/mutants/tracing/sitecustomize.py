"""Write down which lines of a package each test runs, also in the processes that it starts.

Python imports this file by its name at the start of every process in whose PYTHONPATH its folder is. pytest leaves the
name of the running test in the environment, which processes inherit. Lines are written at once: many of those processes
end without a word.
"""

import os
import sys
import threading


def _start(folder: str, prefix: str) -> None:
    file = os.open(os.path.join(folder, "lines.txt"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    seen: set[tuple[str, int]] = set()
    state = {"test": ""}

    def line(frame, event, argument):  # noqa: ANN001, ANN202
        if event == "line":
            test = os.environ.get("PYTEST_CURRENT_TEST")
            if test:
                name = test.rpartition(" ")[0]
                if name != state["test"]:
                    seen.clear()
                    state["test"] = name
                key = (frame.f_code.co_filename, frame.f_lineno)
                if key not in seen:
                    seen.add(key)
                    os.write(file, f"{name}\t{key[0]}\t{key[1]}\n".encode())
        return line

    def call(frame, event, argument):  # noqa: ANN001, ANN202
        return line if frame.f_code.co_filename.startswith(prefix) else None

    threading.settrace(call)
    sys.settrace(call)


if os.environ.get("MUTANTS_LINES"):
    _start(os.environ["MUTANTS_LINES"], os.environ["MUTANTS_SOURCE"])
