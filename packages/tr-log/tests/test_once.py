import logging

import pytest

from tr_log import info_once, warning_once


@pytest.fixture
def logger(request):
    return logging.getLogger(f"once.{request.node.name}")


def test_a_warning_is_given_once_for_each_text(logger, caplog):
    for number in (1, 1, 2, 1):
        warning_once(logger, "column %d is 100%% empty", number)
    assert [record.getMessage() for record in caplog.records] == [
        "column 1 is 100% empty",
        "column 2 is 100% empty",
    ]


def test_a_text_without_values_may_hold_percent_signs(logger, caplog):
    warning_once(logger, "100% done")
    assert caplog.messages == ["100% done"]


def test_another_logger_and_another_level_give_it_again(logger, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        warning_once(logger, "text")
        info_once(logger, "text")
        warning_once(logger.getChild("other"), "text")
    assert [(r.name == logger.name, r.levelname) for r in caplog.records] == [
        (True, "WARNING"),
        (True, "INFO"),
        (False, "WARNING"),
    ]


def test_what_was_below_the_level_is_given_when_the_level_allows_it(logger, caplog):
    logger.setLevel(logging.ERROR)
    warning_once(logger, "text")
    logger.setLevel(logging.WARNING)
    warning_once(logger, "text")
    assert caplog.messages == ["text"]


def test_the_record_names_the_callers_file(logger, caplog):
    warning_once(logger, "text")
    assert caplog.records[0].filename == "test_once.py"
