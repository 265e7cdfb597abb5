"""What does not grow with the rows of the data, the position in them or the number of ranks, as its bench counts it."""

import json
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "packages/tr-core/bench/growth.py"


def test_a_step_of_1024_ranks_calls_and_allocates_what_one_of_8_does(bench):
    bench.rank_costs(2)  # fills caches

    def least(name, ranks):
        return min(getattr(each, name) for each in ranks)  # what is due by the clock may fall into a step

    few, many = ([bench.rank_costs(size) for _ in range(3)] for size in (8, 1024))
    assert least("step_calls", many) == least("step_calls", few) > 100
    assert least("step_bytes", many) < least("step_bytes", few) + 2048
    assert least("log_sent_bytes", many) <= least("log_sent_bytes", few) + 16
    assert least("save_bytes", many) < 1024 * 200


@pytest.mark.parametrize("strategy", ["random_computed", "sequential"])
def test_an_order_of_a_trillion_rows_takes_what_one_of_ten_thousand_does(bench, strategy):
    few, many = (bench.order_bytes(bench.sampler_of(number, strategy)) for number in (10**4, 10**12))
    assert many < few + 4096


def test_a_list_of_rows_takes_four_bytes_each(bench):
    assert bench.order_bytes(bench.sampler_of(10**5, "random")) < 4 * 10**5 + 4096


def test_only_a_stream_without_a_state_is_read_again(bench):
    assert bench.read_to(1000, knows=True) == 0
    assert bench.read_to(1000, knows=False) == 1000


def test_the_table_is_printed_and_written(bench, tmp_path, capsys):
    bench.main(["rows", "positions", "--rounds", "1", "--rows", "100", "10000", "--positions", "8", "80",
                 "--json", str(tmp_path / "growth.json")])  # fmt: skip
    written = json.loads((tmp_path / "growth.json").read_text("utf-8"))
    assert {row["by"] for row in written["rows"]} == {"rows", "position"}
    printed = capsys.readouterr().out
    assert all(row["cost"] in printed and row["command"] in printed for row in written["rows"])
