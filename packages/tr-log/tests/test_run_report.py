import logging

import pytest

from tr_log import MetricsFile, RunReport


@pytest.fixture
def report(caplog, tmp_path, make_loop):
    caplog.set_level(logging.INFO)

    def run(change=lambda loop: None, **how):
        loop = make_loop([MetricsFile(), RunReport()], tmp_path / "out", **how.pop("settings", {}))
        change(loop)
        loop.train(**how)
        texts = [message for message in caplog.messages if message.startswith("run report")]
        assert len(texts) == 1
        return dict(line.strip().split("  ", 1) for line in texts[0].splitlines()[1:])

    return run


def test_it_logs_steps_speed_last_and_best_values_and_where_the_files_are(report, tmp_path):
    for step in (2, 10, 9):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
    rows = report()
    assert rows["steps"].strip().startswith("6 in ")
    assert rows["steps"].endswith(", 32 samples/s)")
    assert rows["training"].strip() == "loss 0.1667  (step 6)"
    assert rows["evaluation"].strip() == "eval_loss 0.1429  (step 6)"
    assert rows["best"].strip() == "eval_loss 0.1429  (step 6)"
    assert rows["metrics"].strip() == str(tmp_path / "out" / "metrics.jsonl")
    assert rows["checkpoint"].strip() == f"{tmp_path / 'out' / 'checkpoint-10'}, 2 earlier beside it"


def test_the_best_value_is_the_trainers_where_it_keeps_one(report):
    def change(loop):
        loop.state.best_metric, loop.state.best_global_step = 0.875, 4

    rows = report(change, settings={"metric_for_best_model": "eval_f1"})
    assert rows["best"].strip() == "eval_f1 0.875  (step 4)"


def test_a_resumed_run_that_fails_is_reported_as_far_as_it_came(caplog, tmp_path, make_loop):
    caplog.set_level(logging.INFO)
    with pytest.raises(KeyError):
        make_loop([RunReport()], tmp_path).train(resume=(2, []), stop_at=3, error=KeyError("boom"), eval_steps=0)
    rows = caplog.messages[-1].splitlines()
    assert rows[0] == "run report"
    assert rows[1].strip().startswith("steps     3/6 (50%) in ")
    assert " (from step 2, " in rows[1]
    assert rows[2].strip() == "training  loss 0.3333  (step 3)"
    assert len(rows) == 3


def test_other_processes_report_nothing(caplog, tmp_path, make_loop):
    caplog.set_level(logging.INFO)
    make_loop([RunReport()], tmp_path, main=False).train()
    assert caplog.messages == []
    make_loop([RunReport()], tmp_path, main=True).train()
    assert caplog.messages != []
