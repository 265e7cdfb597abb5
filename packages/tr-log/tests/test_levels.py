import logging
import re

import pytest

from tr_log import process_log_level
from tr_log.loggers import parse_level

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR
# Two nodes of two processes: rank, local rank.
PROCESSES = [(0, 0), (1, 1), (2, 0), (3, 1)]


@pytest.mark.parametrize(
    ("arguments", "levels"),
    [
        # my_app.py ... --log_level warning --log_level_replica error
        (("warning", "error", True), [WARNING, ERROR, WARNING, ERROR]),
        # my_app.py ... --log_level warning --log_level_replica error --log_on_each_node 0
        (("warning", "error", False), [WARNING, ERROR, ERROR, ERROR]),
        # my_app.py ... --log_level error --log_level_replica error --log_on_each_node 0
        (("error", "error", False), [ERROR, ERROR, ERROR, ERROR]),
        # my_app.py ...
        (("passive", "warning", True), [INFO, WARNING, INFO, WARNING]),
        (("passive", "passive", True), [INFO, WARNING, INFO, WARNING]),
        (("passive", "passive", False), [INFO, WARNING, WARNING, WARNING]),
        (("DEBUG", 35, True), [DEBUG, 35, DEBUG, 35]),
    ],
)
def test_each_process_of_two_nodes_gets_its_level(arguments, levels):
    assert [process_log_level(*arguments, rank=rank, local_rank=local) for rank, local in PROCESSES] == levels


@pytest.mark.parametrize(
    ("level", "number"), [("info", 20), ("Critical", 50), (0, 0), (17, 17), ("25", 25), (" error ", 40)]
)
def test_a_level_is_a_name_or_a_number(level, number):
    assert parse_level(level) == number


@pytest.mark.parametrize("level", ["loud", "", "-1", -10, 1.5, None, "passive", True])
def test_anything_else_is_refused_with_the_value_and_what_is_needed(level):
    expected = (
        f"level={level!r} is not a logging level; it must be one of debug, info, warning, error, critical or a number"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse_level(level)


def test_a_misspelt_level_brings_a_suggestion_and_the_argument_it_belongs_to():
    with pytest.raises(ValueError, match=r"log_level_replica='warn1ng' .*; did you mean warning\?"):
        process_log_level("info", "warn1ng", True, rank=0, local_rank=0)
