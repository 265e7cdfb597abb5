from tr_log.progress import RateMeter


def test_the_speed_is_that_since_the_last_look_and_the_time_left_by_the_whole(clock):
    pace = RateMeter(0, 100, clock)
    clock.now += 10
    assert pace.rate(10) == 1.0
    clock.now += 10
    assert pace.rate(50) == 4.0
    assert pace.mean_rate(50) == 2.5
    assert pace.eta_s(50) == 20.0
    assert pace.elapsed_s == 20.0


def test_steps_before_a_resume_do_not_count(clock):
    pace = RateMeter(90, 100, clock)
    clock.now += 5
    assert pace.eta_s(95) == 5.0


def test_time_that_is_excluded_does_not_slow_the_next_speed(clock):
    pace = RateMeter(0, None, clock)
    clock.now += 10
    pace.exclude(8)
    assert pace.rate(4) == 2.0
    clock.now += 2
    assert pace.rate(8) == 2.0


def test_nothing_is_known_before_anything_was_done_or_without_an_end(clock):
    pace = RateMeter(0, 0, clock)
    assert (pace.rate(0), pace.mean_rate(0), pace.eta_s(0)) == (None, None, None)
    clock.now += 1
    assert pace.eta_s(5) is None
    assert RateMeter(0, 5, clock).eta_s(5) is None
