"""The examples of the README run, and print what it says."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


def test_the_examples_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, "README.md", "exec", dont_inherit=True), {"__name__": "example"})
    printed = capsys.readouterr().out
    shown = re.search(r"(?:^    .*\n)+(?=\nWithout a list)", README, flags=re.MULTILINE)
    assert printed == "".join(line[4:] for line in shown.group().splitlines(keepends=True))


def test_the_file_map_names_every_file():
    source = Path(__file__).parent.parent / "src" / "tr_args"
    names = {path.name for path in source.glob("*.py")} - {"__init__.py"}
    assert names == {name for name in re.findall(r"`(\w+\.py)`", README) if name != "train.py"}
