"""Running all examples: what is good, what is not, and what is printed of it."""

import json

import pytest
import run_all
from run_all import EXAMPLES, Bound, Example, Outcome, main, table

ACCURATE = (Bound("accuracy", at_least=0.9),)


def outcome(results, code=0, bounds=ACCURATE):
    return Outcome("digits", Example("digits.py", "outputs/digits", bounds), code, 12.3, 20.6, results)


@pytest.mark.parametrize(
    ("bound", "good", "bad"),
    [
        (Bound("x", at_least=0.5), {"x": 0.5}, {"x": 0.49}),
        (Bound("x", at_most=0.5), {"x": 0.5}, {"x": 0.51}),
        (Bound("x", at_least="y"), {"x": 2, "y": 1}, {"x": 1, "y": 2}),
        (Bound("x", at_most="y"), {"x": 1, "y": 2}, {"x": 2, "y": 1}),
        (Bound("x", at_most=0.5), {"x": -1}, {"x": float("nan")}),
    ],
)
def test_a_bound_holds_or_not(bound, good, bad):
    assert bound.holds(good)
    assert not bound.holds(bad)


def test_an_example_is_good_if_it_ends_well_and_keeps_to_its_bounds():
    assert outcome({"accuracy": 0.95}).is_good
    assert not outcome({"accuracy": 0.85}).is_good
    assert not outcome({"accuracy": 0.95}, code=1).is_good
    assert not outcome({}).is_good


def test_the_table_says_what_was_measured_and_what_was_missed():
    bounds = (Bound("accuracy", at_least=0.9), Bound("loss", at_most="before"))
    printed = table([outcome({"accuracy": 0.85, "loss": 1, "before": 2}, bounds=bounds), outcome({}, code=-9)])
    assert printed.splitlines() == [
        "example  metric    value  must be                         wall s  cpu s",
        "digits   accuracy  0.85   >= 0.9     MISSED               12      21",
        "         loss      1      <= before  ok",
        "digits   accuracy  none   >= 0.9     failed with code -9  12      21",
    ]


def test_it_runs_scripts_without_what_an_earlier_call_left_and_returns_what_is_missed(tmp_path, monkeypatch, capfd):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "folder = pathlib.Path('out')\n"
        "assert not folder.exists()\n"
        "folder.mkdir()\n"
        "(folder / 'all_results.json').write_text(json.dumps({'accuracy': float(sys.argv[1])}))\n"
    )
    monkeypatch.chdir(tmp_path)
    examples = {name: Example(str(script), "out", ACCURATE, (value,)) for name, value in (("a", "0.95"), ("b", "0.5"))}
    monkeypatch.setattr(run_all, "EXAMPLES", examples)
    assert main(["a"]) == 0
    assert main(["a", "b"]) == 1
    assert "MISSED" in capfd.readouterr().out
    assert json.loads((tmp_path / "outputs/run_all/out/all_results.json").read_text()) == {"accuracy": 0.5}


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["digitz"])
    assert "there is no example 'digitz'; there are text_classification" in capsys.readouterr().err


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_is_there_with_a_readme(name):
    script = run_all.HERE / EXAMPLES[name].script
    assert script.is_file()
    assert script.with_name("README.md").read_text("utf-8").startswith("# ")
