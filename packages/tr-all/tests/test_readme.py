"""What the README shows works, and its table of names is the package's."""

import re
from pathlib import Path

import tr_all

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_example_of_the_readme_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    example = example.replace("num_train_epochs=20", "num_train_epochs=20, use_cpu=True")
    exec(compile(example, "README.md", "exec", dont_inherit=True), {"__name__": "example"})
    assert float(capsys.readouterr().out.splitlines()[-1]) < 0.5
    assert (tmp_path / "out/checkpoint-200").is_dir()


def test_the_table_of_names_is_that_of_the_package():
    rows = re.findall(r"^\| (.*) \| `(tr_\w+)` \|$", README, re.MULTILINE)
    told = {name: package for names, package in rows for name in re.findall(r"`(\w+)`", names)}
    assert told == tr_all._ORIGINS
