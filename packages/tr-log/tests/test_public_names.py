from pathlib import Path

import tr_log


def test_the_public_names_are_those_that_are_frozen():
    frozen = (Path(__file__).parents[1] / "api.txt").read_text().split()
    assert sorted(tr_log.__all__) == sorted(frozen)
    assert all(hasattr(tr_log, name) for name in frozen)


def test_every_entry_point_makes_a_callback():
    import tomllib
    from importlib import import_module

    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["tr.callbacks"]
    assert sorted(points) == ["csv", "jsonl", "mlflow", "tensorboard", "wandb"]
    for value in points.values():
        module, _, path = value.partition(":")
        owner, method = path.split(".")
        assert callable(getattr(getattr(import_module(module), owner), method))
    assert tr_log.MetricsFile.timed(None).name == "metrics-timed.jsonl"
    assert tr_log.CsvFile.from_arguments(None).name == "metrics.csv"
