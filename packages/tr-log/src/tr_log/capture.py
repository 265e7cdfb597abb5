"""Lead what `warnings.warn` says into the logs."""

from __future__ import annotations

import logging

from tr_log.rank_handler import rank_handler


def capture_warnings(capture: bool) -> None:
    """Send Python's warnings through the logger `py.warnings`, with the rank prefix, or stop doing so.

    Args:
        capture: True to log them at level WARNING, False to have them printed as Python does.
    """
    logging.captureWarnings(capture)
    logger = logging.getLogger("py.warnings")
    if capture:
        logger.addHandler(rank_handler())
    else:
        logger.removeHandler(rank_handler())
