"""What one test does to the packages' loggers is undone before the next, whichever packages they are of."""

import logging

import pytest

from tr_log import configure, get_logger, info_once


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_finds_the_loggers_as_they_are_in_a_new_process(number, caplog):
    logger = get_logger("tr_ckpt")
    assert logging.getLogger("tr_ckpt").level == logging.NOTSET
    with caplog.at_level(logging.INFO):
        info_once(logger, "said once")
    assert caplog.messages == ["said once"]
    configure(level="critical")
    assert logger.level == logging.CRITICAL
