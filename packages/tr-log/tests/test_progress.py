import io

import pytest

from tr_log import progress, progress_bar
from tr_log.progress import length


def test_items_come_through_in_order_and_quick_work_leaves_no_line():
    stream = io.StringIO()
    assert list(progress(iter("abc"), description="reading", stream=stream)) == ["a", "b", "c"]
    assert stream.getvalue() == ""


def test_an_error_in_the_work_or_an_early_end_passes_through():
    def broken():
        yield 1
        raise KeyError("boom")

    with pytest.raises(KeyError):
        list(progress(broken(), stream=io.StringIO()))
    for item in progress(range(5), stream=io.StringIO()):
        if item == 2:
            break
    assert item == 2


def test_disabled_it_hands_on_the_items_only():
    assert list(progress([1, 2], disable=True)) == [1, 2]


def test_a_length_is_known_only_where_the_data_has_one():
    class Endless:
        def __len__(self):
            raise TypeError("endless")

    assert length([1, 2]) == 2
    assert length(Endless()) is None
    assert length(iter([1])) is None


def test_work_that_is_no_iteration_is_counted_by_hand():
    stream = io.StringIO()
    with progress_bar("downloading", 100, unit="B", stream=stream) as bar:
        bar.advance(60)
        assert bar.completed == 60
    assert stream.getvalue() == ""
