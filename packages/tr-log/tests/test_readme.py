import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(code, folder):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("code", EXAMPLES, ids=["logging", "progress", "loop"])
def test_an_example_runs_as_it_stands(code, tmp_path):
    run(code, tmp_path)


def test_the_logging_example_prints_what_its_last_line_says(tmp_path):
    promised = EXAMPLES[0].strip().splitlines()[-1].removeprefix("# ")
    printed = run(EXAMPLES[0], tmp_path).stderr.strip()
    assert re.sub(r"\d\d:\d\d:\d\d", "TIME", printed) == re.sub(r"\d\d:\d\d:\d\d", "TIME", promised)


def test_the_loop_example_writes_the_lines_that_are_shown(tmp_path):
    shown = re.search(r"```text\n(.*?)```", README, flags=re.DOTALL)[1]
    printed = run(EXAMPLES[2], tmp_path).stderr
    varying = re.compile(r"\d\d:\d\d:\d\d|\d+:\d\d|eta \S+|[\d.]+ (it/s|s/it|step/s|s/step)| +")

    def fixed(text):
        return [varying.sub("~", line).replace("~~", "~").rstrip("~") for line in text.strip().splitlines()]

    assert fixed(printed) == fixed(shown)
