import pytest

from tr_log import MLflowTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # the warnings of another project and of what it uses
mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
pytest.importorskip("sqlalchemy", reason="the local store is a database")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One database for all tests: making its tables takes seconds."""
    return tmp_path_factory.mktemp("mlflow") / "runs.db"


@pytest.fixture(autouse=True)
def local(store, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{store}")
    mlflow.set_experiment(request.node.name)
    yield
    mlflow.end_run()


def runs():
    return mlflow.search_runs(output_format="list", order_by=["start_time ASC"])


def curve(run, name):
    return [(m.step, m.value) for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)]


def test_a_run_holds_the_settings_and_what_was_logged_evaluations_afterwards_too(tmp_path, make_loop):
    loop = make_loop([MLflowTracker.from_arguments(None)], tmp_path, max_steps=2, learning_rate=0.5, long="x" * 9000)
    loop.train(eval_steps=0)
    assert mlflow.active_run() is None
    loop.evaluate()
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert run.data.params["learning_rate"] == "0.5"
    assert len(run.data.params["long"]) == 500
    assert curve(run, "train/loss") == [(1, 1.0), (2, 0.5)]
    assert curve(run, "eval/loss") == [(2, pytest.approx(1 / 3))]


def test_a_failed_training_is_marked_and_the_next_is_another_run(tmp_path, make_loop):
    tracker = MLflowTracker()
    with pytest.raises(KeyError):
        make_loop([tracker], tmp_path).train(stop_at=1, error=KeyError("boom"))
    make_loop([tracker], tmp_path, max_steps=1).train()
    assert [run.info.status for run in runs()] == ["FAILED", "FINISHED"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_a_training_that_a_signal_stopped_is_marked_as_killed(tmp_path, make_loop, error):
    tracker = MLflowTracker()
    loop = make_loop([tracker], tmp_path)
    with pytest.raises(type(error)):
        loop.train(stop_at=1, error=error)
    loop.evaluate()
    assert [run.info.status for run in runs()] == ["KILLED"]


def test_characters_that_mlflow_refuses_in_names_cost_no_entry(tmp_path, make_loop, caplog):
    loop = make_loop([MLflowTracker()], tmp_path)
    loop.train(stop_at=1)
    loop.log({"eval_f1@5 (top)": 0.5, "größe": 2, "eval_loss": 0.25})
    (run,) = runs()
    assert curve(run, "eval/f1_5 _top_") == [(1, 0.5)]
    assert curve(run, "train/größe") == [(1, 2.0)]
    assert curve(run, "eval/loss") == [(1, 0.25)]
    assert "could not record" not in caplog.text


def test_a_run_that_has_settings_keeps_them_and_gets_the_others(tmp_path, make_loop, caplog):
    caplog.set_level("INFO", "tr_log")
    with mlflow.start_run():
        mlflow.log_params({"learning_rate": "0.1", "seed": 3})
        make_loop([MLflowTracker()], tmp_path, max_steps=1, learning_rate=0.5, seed=3, weight_decay=0.25).train()
    (run,) = runs()
    found = {name: run.data.params[name] for name in ("learning_rate", "seed", "weight_decay")}
    assert found == {"learning_rate": "0.1", "seed": "3", "weight_decay": "0.25"}
    assert "the run of mlflow keeps the values that it has of learning_rate" in caplog.text
    assert "could not record" not in caplog.text


def test_a_run_of_the_script_is_used_and_left_open(tmp_path, make_loop):
    own = mlflow.start_run()
    make_loop([MLflowTracker()], tmp_path, max_steps=1).train()
    assert mlflow.active_run().info.run_id == own.info.run_id
    assert len(runs()) == 1
