import threading
import time

import pytest

from tr_log.phases import COMPUTE, EVALUATION, PhaseClock, active_clock, phase, phase_clock


@pytest.fixture
def now(monkeypatch):
    """A clock that stands until it is moved: `now[0] += seconds`."""
    moment = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: moment[0])
    return moment


def test_the_phases_add_up_to_the_whole_time(now):
    with phase_clock() as clock:
        now[0] += 1
        clock.switch(COMPUTE)
        now[0] += 2
        with phase(EVALUATION):
            now[0] += 4
            with phase("checkpoint"):
                now[0] += 8
            now[0] += 16
        now[0] += 32
        assert clock.take() == {"start": 1, "compute": 34, "evaluation": 20, "checkpoint": 8}
        now[0] += 64
        assert clock.take() == {"compute": 64}


def test_waiting_for_data_is_taken_out_of_computing(now):
    clock = PhaseClock(COMPUTE)
    now[0] += 10
    clock.waited_s += 3
    assert clock.take() == {"compute": 7, "data": 3}
    clock.waited_s += 3  # it cannot be more than what computing has
    assert clock.take() == {}


def test_the_total_has_all_that_was_taken_and_takes_nothing(now):
    clock = PhaseClock(COMPUTE)
    now[0] += 10
    clock.waited_s += 3
    assert clock.total() == {"compute": 7, "data": 3}
    assert clock.take() == {"compute": 7, "data": 3}
    now[0] += 5
    assert clock.total() == {"compute": 12, "data": 3}
    assert clock.training_s == 15
    assert clock.take() == {"compute": 5}


def test_the_time_of_training_has_no_evaluation_and_no_save_and_goes_on_over_reports(now):
    with phase_clock() as clock:
        now[0] += 1
        assert clock.training_s == 0
        clock.switch(COMPUTE)
        now[0] += 2
        clock.waited_s += 1
        assert clock.training_s == 2
        with phase(EVALUATION):
            now[0] += 4
            assert clock.training_s == 2
        clock.take()
        now[0] += 8
        with phase("exchange"):
            now[0] += 16
        with phase("checkpoint"):
            now[0] += 32
        assert clock.training_s == 26


def test_waiting_for_gradients_is_taken_out_of_computing_where_it_is_known(now):
    clock = PhaseClock(COMPUTE)
    now[0] += 10
    clock.take()
    assert not clock.knows_exchange
    clock.exchanged_s = lambda: 4.0
    now[0] += 10
    clock.waited_s += 3
    assert clock.take() == {"compute": 3, "data": 3, "exchange": 4}
    assert clock.knows_exchange
    now[0] += 1
    clock.waited_s += 0.5
    assert clock.take() == {"data": 0.5, "exchange": 0.5}  # not more than what computing has
    assert clock.training_s == 21


def test_a_block_that_raises_ends_its_phase(now):
    with phase_clock() as clock:
        with pytest.raises(KeyError), phase(EVALUATION):
            raise KeyError
        assert clock.phase == "start"
    assert active_clock() is None


def test_without_a_clock_and_in_another_thread_a_phase_does_nothing():
    with phase(EVALUATION):
        assert active_clock() is None
    seen = []
    with phase_clock():
        thread = threading.Thread(target=lambda: seen.append(active_clock()))
        thread.start()
        thread.join(10)
    assert seen == [None]
