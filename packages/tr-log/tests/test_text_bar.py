import io

from tr_log.progress import TextBar


def run(clock, seconds, total, each_s, unit="it", amount=1):
    stream = io.StringIO()
    bar = TextBar(stream, "skipping data", total, unit=unit, clock=clock)
    for _ in range(int(seconds / each_s)):
        clock.now += each_s
        bar.advance(amount)
    bar.close()
    return stream.getvalue().splitlines()


def test_what_is_done_within_ten_seconds_leaves_no_line(clock):
    assert run(clock, 9, 90, 0.1) == []


def test_a_line_comes_at_most_every_ten_seconds_and_one_at_the_end(clock):
    assert run(clock, 32, 40, 1.0) == [
        "skipping data 10/40 (25%)  1.00 it/s  eta 0:30",
        "skipping data 20/40 (50%)  1.00 it/s  eta 0:20",
        "skipping data 30/40 (75%)  1.00 it/s  eta 0:10",
        "skipping data 32/40 (80%)  1.00 it/s  eta 0:08",
    ]


def test_a_days_work_takes_less_than_a_hundred_lines(clock):
    lines = run(clock, 86400, None, 1.0)
    assert 50 < len(lines) < 100
    assert lines[-1] == "skipping data 86400  1.00 it/s  after 1d 00:00:00"


def test_bytes_are_counted_as_such(clock):
    assert run(clock, 12, 24_000_000, 1.0, unit="B", amount=1_000_000)[0] == (
        "skipping data 10 MB/24 MB (41%)  1 MB/s  eta 0:14"
    )
