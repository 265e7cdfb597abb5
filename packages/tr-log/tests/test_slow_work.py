"""Work that takes longer than an exchange between ranks may."""

import threading

import pytest

from tr_log import slow_work


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(slow_work, "HEAR_EVERY_S", 0.01)


def test_ranks_hear_of_each_other_until_all_are_done():
    heard, done = [], threading.Event()

    def exchange(value):
        heard.append(value)
        if len(heard) == 3:
            done.set()
        return [value, "theirs"]

    assert slow_work.apart(exchange, lambda: done.wait(60)) == [True, "theirs"]
    assert len(heard) >= 4
    assert True not in heard[:3]


def test_a_watch_sees_who_works_how_far_it_is_and_what_was_before(monkeypatch):
    seen, done = [], threading.Event()
    monkeypatch.setattr(slow_work, "measure", lambda: {"group": 7})

    def work():
        slow_work.advance()
        return done.wait(60)

    def exchange(value):
        now = slow_work.current
        seen.append((now.before, now.thread is not None, now.operations))
        if len(seen) == 3:
            done.set()
        return [value, "theirs"]

    assert slow_work.current is None
    slow_work.apart(exchange, work)
    assert slow_work.current is None
    assert seen[0] == ({"group": 7}, True, ())
    (first, other), (second, _) = seen[1][2], seen[2][2]
    assert other is None
    assert first == second
    assert seen[-1][:2] == ({"group": 7}, False)


def test_work_that_is_given_up_has_ended_when_the_error_goes_on():
    ended, given_up = [], threading.Event()

    def fail(value):
        raise ConnectionError("a rank is gone")

    with pytest.raises(ConnectionError, match="a rank is gone"):
        slow_work.apart(fail, lambda: ended.append(given_up.wait(60)), given_up.set)
    assert ended == [True]


def test_work_in_a_thread_has_the_settings_of_torch_of_the_caller():
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        assert not slow_work.in_thread(torch.is_grad_enabled).result(60)
    assert slow_work.in_thread(torch.is_grad_enabled).result(60)
    with torch.inference_mode():
        assert slow_work.in_thread(torch.is_inference_mode_enabled).result(60)
