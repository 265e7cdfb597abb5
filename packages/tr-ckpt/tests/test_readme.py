"""What the README shows works."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_the_example_of_the_readme_runs_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)

    def run(last):
        torch.manual_seed(0)
        names = {}
        exec(compile(example.replace("21)", f"{last + 1})"), "README.md", "exec"), names)
        return names

    def weights(names):
        return torch.cat([value.reshape(-1) for value in names["model"].state_dict().values()])

    stopped = run(12)  # saved at 10
    assert stopped["checkpointer"].steps() == [5, 10]
    resumed = run(20)
    assert resumed["start"] == 10
    assert resumed["checkpointer"].steps() == [10, 15, 20]

    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert torch.equal(weights(run(20)), weights(resumed))


def test_every_file_is_in_the_readme_s_map():
    text = README.read_text(encoding="utf-8")
    for path in (README.parent / "src" / "tr_ckpt").glob("*.py"):
        assert path.name == "__init__.py" or f"`{path.name}`" in text, path.name
