from pathlib import Path

import tr_log


def test_the_public_names_are_those_that_are_frozen():
    frozen = (Path(__file__).parents[1] / "api.txt").read_text().split()
    assert sorted(tr_log.__all__) == sorted(frozen)
    assert all(hasattr(tr_log, name) for name in frozen)


def test_every_entry_point_makes_a_callback():
    import tomllib
    from importlib import import_module
    from operator import attrgetter

    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["tr.trackers"]
    assert {"jsonl", "mlflow", "tensorboard", "wandb"} < set(points)
    for value in points.values():
        module, _, path = value.partition(":")
        assert callable(attrgetter(path)(import_module(module)))
    assert tr_log.MetricsFile.timed(None).name == "metrics-timed.jsonl"
