"""The page of performance is written from what the benchmarks measured, and its list of them is right."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_SPEC = importlib.util.spec_from_file_location("bench_of_all", ROOT / "tools" / "bench.py")
bench = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = bench  # its dataclasses look for their module
sys.path.insert(0, str(ROOT / "tools"))
_SPEC.loader.exec_module(bench)
ABOUT = {
    "date": "2026-01-02",
    "machine": "x86_64, 2 cores, no GPU",
    "python": "3.11",
    "versions": {"a": "1"},
}


def ran(results, text="lines\n"):
    return {"command": "python x.py", "exit": 0, "seconds": 1, "text": text, "results": results}


def test_every_benchmark_has_its_script_and_the_options_it_is_called_with():
    for name, part in bench.PARTS.items():
        script = (ROOT / part.script).read_text(encoding="utf-8")
        options = [option for option in part.options if option.startswith("--")]
        for option in [*options, *(["--json"] if part.writes_json else [])]:
            assert f'"{option}"' in script, (name, option)
    assert {goal.part for goal in bench.GOALS} <= {name for name, part in bench.PARTS.items() if part.writes_json}


def test_the_page_says_which_goals_were_met_missed_and_not_measured():
    parts = {
        "step": ran({"2 layers of 16": {"tr-core": {"ratio": 1.05}}}),
        "defaults": ran({"2 layers of 16": {"ratio": 1.3}}),
    }
    page = bench.write_page({"about": ABOUT, "parts": parts})
    (step,) = [line for line in page.splitlines() if line.startswith("| a step, 2 layers of 16")]
    assert step.endswith("| 1.1 | 1.050 |")
    assert "| default callbacks on a terminal, 2 layers of 16 | 1.02 | 1.300, missed |" in page
    assert "| default callbacks on a terminal, 8 layers of 256 | 1.02 | not measured |" in page
    assert "```text\nlines\n```" in page
    assert "They need a CUDA device: Language models in bfloat16" in page
    assert "2026-01-02, x86_64, 2 cores, no GPU, Python 3.11, a 1." in page


def test_one_benchmark_gets_options_of_its_own_and_writes_no_page(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text("import sys, os\nprint(sys.argv[1:], os.environ['OMP_NUM_THREADS'])")
    monkeypatch.setitem(bench.PARTS, "step", bench.Part("A step", str(script), ("--rounds", "5")))
    monkeypatch.setattr(bench, "DOCS", tmp_path)
    assert bench.main(["step", "--rounds", "9"]) == 0
    assert bench.main(["step"]) == 0
    said = capsys.readouterr().out
    assert "['--rounds', '9'] 1" in said
    assert "['--rounds', '5'] 1" in said
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_the_whole_run_writes_page_and_results_unless_one_fails(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('fine')\nsys.exit(len(sys.argv) > 1)")
    monkeypatch.setattr(bench, "DOCS", tmp_path)
    monkeypatch.setattr(bench, "PARTS", {"a": bench.Part("A", str(script)), "b": bench.Part("B", str(script), ("x",))})
    assert bench.main([]) == 1
    assert "failed: b; no page was written" in capsys.readouterr().err
    assert not (tmp_path / "performance.md").exists()
    monkeypatch.setattr(bench, "PARTS", {"a": bench.Part("A", str(script))})
    assert bench.main([]) == 0
    page, results = tmp_path / "performance.md", tmp_path / "performance.json"
    assert "## A" in page.read_text()
    assert json.loads(results.read_text())["parts"]["a"]["text"] == "fine\n"
    script.write_text("print('renewed')")
    assert bench.main(["a", "--renew"]) == 0
    assert "renewed" in page.read_text()
    script.write_text("print('fine')")
    assert bench.main([]) == 0
    page.unlink()
    assert bench.main(["--from", str(results)]) == 0
    assert "fine" in page.read_text()


def test_unknown_names_and_options_without_a_name_are_refused_in_words(capsys):
    for arguments, expected in ((["stepp"], "no benchmark 'stepp'; there are step"), (["--rounds", "5"], "--rounds")):
        with pytest.raises(SystemExit):
            bench.main(arguments)
        assert expected in capsys.readouterr().err
