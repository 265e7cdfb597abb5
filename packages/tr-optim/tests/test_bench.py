"""The scripts of `bench/` run, at small size."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
SMALL = "width=16 layers=1 heads=2 length=8 batch=2 steps=4 warmup=2 rank=4 gap=2 eval_every=2 eval_rows=4 final_rows=4"


@pytest.fixture
def script(monkeypatch):
    """Return what imports a script; its name is free again afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    own = {path.stem for path in BENCH.glob("*.py")}
    for name in set(sys.modules) - before & own:
        if name in own:
            del sys.modules[name]


def run(script, name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    script(name).main()


def test_an_unknown_optimizer_is_refused_with_those_there_are(script):
    contestants = script("contestants")
    model = script("language_model").LanguageModel(16, 8, 1, 2)
    with pytest.raises(SystemExit, match=r"no optimizer is called 'galor'; there are adamw, .*galore_adamw"):
        contestants.build("galor", model, 1e-3, rank=2)


def test_a_first_basis_takes_two_iterations_of_two_products_and_little_else(script):
    rows, columns, rank = 2048, 16384, 128
    counted = script("projection").operations((rows, columns), rank)
    assert 1 <= counted / (2 * 2 * 2 * rows * columns * rank) < 1.05


def test_bases_are_timed_beside_full_svd(script, monkeypatch, tmp_path, capsys):
    found = tmp_path / "found.json"
    run(script, "projection", monkeypatch, "--small", "--rounds", 1, "--without-upstream", "--json", found)
    (ways,) = json.loads(found.read_text())["bases"].values()
    assert ways["warm (each refresh)"]["energy"] > 0.9
    printed = capsys.readouterr().out
    assert "method=svd, full SVD" in printed
    assert "Gemma 2B's 126 matrices" in printed


def test_hooks_are_timed_beside_a_plain_backward_pass(script, monkeypatch, tmp_path, capsys):
    found, small = tmp_path / "found.json", ("--width", 8, "--layers", 3, "--rounds", 2)
    run(script, "hooks", monkeypatch, *small, "--without-upstream", "--json", found)
    results = json.loads(found.read_text())
    assert results["goals"]["adalomo"] == 3.0
    assert results["width 8"]["adalomo"]["ratio"] > 0
    printed = capsys.readouterr().out
    assert printed.startswith("6 tensors, 3 matrices of 8 x 8; 2 rounds")
    assert all(name in printed for name in ("plain", "lomo", "galore_adamw_layerwise"))


@pytest.mark.parametrize(
    ("clip", "besides", "options", "part"),
    [
        pytest.param(0.0, 0, "", 1, marks=pytest.mark.slow),
        pytest.param(1.0, 64 * 64 * 4, "", 1, marks=pytest.mark.slow),
        pytest.param(0.0, 0, ":exchange_dtype=bfloat16", 2, marks=pytest.mark.slow),
        (1.0, 64 * 64 * 4, ":exchange_dtype=bfloat16", 2),
    ],
)
def test_ranks_exchange_a_quarter_at_a_quarter_of_the_rank_and_one_sketch_to_clip_by(
    script, clip, besides, options, part
):
    traffic = script("traffic")
    model = traffic.Layers(*traffic.SIZES["small"])
    whole = sum(p.numel() for p in model.parameters()) * 4
    found = traffic.on_two_ranks((f"galore_adamw_layerwise{options}", "small", 3, 16, clip))
    assert min(found[1:]) == (whole // 4 + besides) // part


def test_with_lomo_less_is_alive_than_all_gradients_would_be(script):
    memory = script("memory")
    model = script("language_model").LanguageModel(**memory.SIZES["tiny"])
    gradients = sum(p.numel() * 4 for p in model.parameters()) / memory.MIB
    assert 0 < memory.measure("lomo", "tiny", profiled=True)["tensors"] < gradients
    resident = memory.measure("lomo", "tiny", profiled=False)
    assert resident["peak"] >= 0
    assert resident["state"] == 0


def test_runs_that_are_there_are_not_run_again_and_others_settings_are_refused(script, monkeypatch, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    usual = ("--text", text, "--results", tmp_path / "results", "--set", *SMALL.split())
    names = ("adamw", "galore_adamw", "lomo")
    run(script, "quality", monkeypatch, "--optimizers", *names, "--lr", 0.01, "--seeds", 0, *usual)
    files = sorted((tmp_path / "results").iterdir())
    assert len(files) == 3
    assert list(json.loads(files[0].read_text())["curve"]) == ["2", "4"]
    written = {file: file.stat().st_mtime_ns for file in files}
    run(script, "quality", monkeypatch, "--optimizers", *names, "--lr", 0.01, *usual)
    assert {file: file.stat().st_mtime_ns for file in files} == written
    with pytest.raises(SystemExit, match="settings"):
        run(script, "quality", monkeypatch, "--optimizers", "adamw", "--lr", 0.02, *usual, "steps=6")
    capsys.readouterr()


def test_a_learning_rate_is_doubled_and_halved_as_long_as_that_is_better(script):
    best_rate = script("quality").best_rate
    assert best_rate(0.01, lambda lr: abs(lr - 0.08)) == 0.08
    assert best_rate(0.01, lambda lr: abs(lr - 0.0025)) == 0.0025
    assert best_rate(0.01, lambda lr: 1.0 if lr < 0.02 else float("nan")) == 0.01


def test_of_each_optimizer_the_learning_rate_counts_that_was_best_with_the_first_seed(script, capsys):
    plot = script("plot")
    losses = {(0.01, 0): 2.0, (0.02, 0): 1.9, (0.02, 1): 2.1, (0.01, 1): 1.0}
    results = [
        {"optimizer": name, "lr": lr, "seed": seed, "validation_loss": loss * factor}
        for name, factor in (("galore_adamw", 1.004), (plot.FULL_SVD[0], 1.0))
        for (lr, seed), loss in losses.items()
    ]
    found = plot.chosen(results)
    assert [run["lr"] for run in found["galore_adamw"]] == [0.02, 0.02]
    plot.print_table(results, found)
    assert "+0.40%" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_for_a_large_model_runs_at_a_small_size(script, monkeypatch, tmp_path, capsys):
    cases = ("step, AdamW", "step, GaLore")
    found = tmp_path / "found.json"
    run(script, "gpu_7b", monkeypatch, "--size", "tiny", "--device", "cpu", "--json", found, "--cases", *cases)
    assert "times AdamW's" in capsys.readouterr().out
    assert list(json.loads(found.read_text())["cases"]) == list(cases)


def test_the_large_model_has_the_parameters_of_llama_7b(script):
    import torch

    llama = script("llama")
    with torch.device("meta"):
        model = llama.Llama(llama.CONFIGS["7b"], checkpoints=True)
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616
