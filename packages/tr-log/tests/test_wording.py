import pytest

from tr_log import formatting


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (9.6, "0:10"), (123, "2:03"), (3723, "1:02:03"), (90061, "1d 01:01:01"), (-5, "0:00")],
)
def test_durations(seconds, text):
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(3.21, "3.21 it/s"), (1, "1.00 it/s"), (1234.5, "1234 it/s"), (0.5, "2.00 s/it"), (0.004, "250 s/it")],
)
def test_speeds_below_one_a_second_are_shown_as_seconds_of_each(rate, text):
    assert formatting.speed(rate) == text


def test_speeds_and_positions_in_bytes():
    assert formatting.speed(1_500_000, "B") == "1.5 MB/s"
    assert formatting.position(500, 2_000_000_000, "B") == "500 B/2 GB (0%)"
    assert formatting.size(2_500_000_000_000) == "2.5 TB"


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (0.43211, "0.4321"),
        (4.1e-05, "4.1e-05"),
        (12345.678, "12345.7"),
        (1.5e9, "1.5e+09"),
        (float("nan"), "nan"),
        (True, "True"),
        (None, "None"),
        (7, "7"),
        ("two\nlines", "two lines"),
        ("\x1b[2Kgone", "\\x1b[2Kgone"),
        ("x" * 120, "x" * 97 + "..."),
    ],
)
def test_values_take_a_few_characters_on_one_line(item, text):
    assert formatting.value(item) == text


def test_an_entry_keeps_its_order_with_the_epoch_last_and_short_names():
    logs = {"epoch": 0.48, "loss": 0.5, "learning_rate": 4.1e-5}
    assert formatting.entry(logs) == ["loss 0.5", "lr 4.1e-05", "epoch 0.48"]
    assert list(logs) == ["epoch", "loss", "learning_rate"]


def test_an_evaluations_timings_are_put_together_at_the_end():
    metrics = {
        "eval_runtime": 1.5,
        "eval_f1": 0.7,
        "eval_samples_per_second": 64.0,
        "eval_steps_per_second": 8.0,
    }
    assert formatting.evaluation(metrics) == ["eval_f1 0.7", "1.5 s, 64 samples/s"]
    assert formatting.evaluation({"test_f1": 0.7}) == ["test_f1 0.7"]


def test_a_position_counts_full_percents_only():
    assert formatting.position(119, 120) == "119/120 (99%)"
    assert formatting.position(7, None) == "7"
    assert formatting.position(7, 0) == "7"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nstep 9/9 (100%)  loss 0.0", "a\\nstep 9/9 (100%)  loss 0.0"),
        ("a\rb", "a\\rb"),
        ("a\u2028b", "a\\u2028b"),
        ("\x1b[2Ka", "\\x1b[2Ka"),
        ("Genauigkeit über alles", "Genauigkeit über alles"),
    ],
)
def test_a_name_cannot_begin_a_line_of_its_own(name, shown):
    assert formatting.entry({name: 1}) == [f"{shown} 1"]
    assert formatting.evaluation({name: 1, "eval_runtime": 2.0}) == [f"{shown} 1", "2 s"]
