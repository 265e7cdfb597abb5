from types import SimpleNamespace

import pytest

from tr_core.data.limits import FirstBatches


def first(number, samples=22, per=4):
    whole = None if samples is None else -(-samples // per)

    def remaining(position):
        return None if samples is None else -(-(samples - position) // per)

    batches = SimpleNamespace(num_batches=whole, num_samples=samples, samples_per_micro_batch=per, remaining=remaining)
    batches.iterate = lambda epoch, position: ((epoch, start) for start in range(position, samples or 99, per))
    return FirstBatches(batches, number)


@pytest.mark.parametrize(("number", "batches", "samples"), [(1, 1, 4), (3, 3, 12), (5, 5, 20), (6, 6, 22), (9, 6, 22)])
def test_lengths_are_those_of_the_first_batches_or_of_all(number, batches, samples):
    found = first(number)
    assert (found.num_batches, found.num_samples, len(found), found.samples_per_micro_batch) == (
        batches,
        samples,
        batches,
        4,
    )
    assert [found.remaining(position) for position in (0, 4, 8)] == [max(batches - n, 0) for n in range(3)]
    assert list(found.iterate(7, 0)) == [(0, 4 * n) for n in range(batches)]
    assert list(found.iterate(7, 4)) == [(0, 4 * n) for n in range(1, batches)]


def test_data_without_a_length_has_none():
    found = first(3, None)
    assert (found.num_batches, found.num_samples, found.remaining(0)) == (None, None, None)
    with pytest.raises(TypeError, match="no length"):
        len(found)
