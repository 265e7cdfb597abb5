"""Retry requests after temporary failures, and keep the access token out of every message.

`Secret` holds the token so that it is never shown by accident.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

from tr_ckpt.errors import PushError
from tr_log.formatting import printable
from tr_log.masking import mask_secrets


class Secret:
    """A text that no `repr`, message, pickle or display of local variables reveals.

    Args:
        text: the token; empty if there is none.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return "<token>"

    def __bool__(self) -> bool:
        return bool(self._text)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an access token is not pickled, so that it ends up in no file; hand it over by itself")

    def reveal(self) -> str:
        """Return the text; do not store it in a variable."""
        return self._text

    def hide_in(self, text: str) -> str:
        """Return `text` with the token, in any quoting, replaced by `<token>`."""
        if not self._text:
            return text
        for form in (self._text, repr(self._text)[1:-1], quote(self._text, safe="")):
            text = text.replace(form, "<token>")
        return text


logger = logging.getLogger(__name__)

T = TypeVar("T")

# Statuses that may differ a moment later; all others below 500 mean that the request is at fault.
_TRANSIENT = (408, 412, 425, 429)

# A Hub that asks for a longer wait will not accept the request in time.
MOST_ASKED_S = 900.0

_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")  # the header `ratelimit: "api";r=0;t=55`


def retried(what: str, work: Callable[[], T], delays_s: Sequence[float], secret: Secret) -> T:
    """Return what `work` returns, after repeating it when a failure may pass.

    The client repeats only some of its requests: not those that make a repository, look at it, or commit to it.

    Args:
        what: what is not done if it fails; messages begin with it.
        work: the request; called once or more often.
        delays_s: how long to wait before each retry, unless the Hub asks for a longer wait.
        secret: the token that no message may show.

    Raises:
        PushError: it failed for good. The error has neither cause nor context: their tracebacks may show a
            request's headers, which hold the token.
    """
    for delay_s in (*delays_s, None):
        try:
            return work()
        except Exception as error:  # libraries below may raise any kind
            reason = printable(mask_secrets(secret.hide_in(_reason(error))))
            may_pass, asked_s, status = _may_pass(error), _asked_s(error), _status(error)
        wait_s = 0.0 if delay_s is None else max(delay_s, asked_s)
        if delay_s is None or not may_pass or wait_s > MOST_ASKED_S:
            asked = f", and asks to wait {asked_s:.0f} s" if asked_s > MOST_ASKED_S else ""
            raise PushError(f"{what}: {reason}{asked}", status=status, may_pass=may_pass)
        logger.warning("%s (%s); trying again in %g s", what, reason, wait_s)
        time.sleep(wait_s)
    raise AssertionError  # the loop's last round returns or raises


def _reason(error: BaseException) -> str:
    texts: dict[str, None] = {}
    seen: list[Any] = []
    for each in _chain(error):
        response = getattr(each, "response", None)
        if response is None or not any(response is other for other in seen):  # otherwise it wraps an earlier one
            seen.append(response)
            said = " ".join(line for line in str(each).split("\n") if not line.startswith("For more information"))
            texts[f"{type(each).__name__}: {' '.join(said.split())}"] = None
    return ", because of ".join(texts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:  # the client wraps the error of a single file's upload
        yield seen
        seen = seen.__cause__


def _response(error: BaseException) -> Any:
    found = (getattr(each, "response", None) for each in _chain(error))
    return next((response for response in found if response is not None), None)


def _status(error: BaseException) -> int | None:
    return getattr(_response(error), "status_code", None)


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _TRANSIENT
    kinds = {type(each).__name__ for each in _chain(error)}
    if kinds & {"OfflineModeIsEnabled", "LocalTokenNotFoundError"}:  # no request was sent, nor would a retry send one
        return False
    if "LocalEntryNotFoundError" in kinds:  # a download did not reach the Hub
        return True
    if any(isinstance(each, FileNotFoundError | PermissionError | IsADirectoryError) for each in _chain(error)):
        return False
    return not isinstance(error, ValueError | TypeError)


def _asked_s(error: BaseException) -> float:
    headers = getattr(_response(error), "headers", None) or {}
    after = str(headers.get("Retry-After") or "").strip()
    if after.isdigit():
        return float(after)
    if after:
        try:
            return max(0.0, (parsedate_to_datetime(after) - datetime.now(UTC)).total_seconds())
        except (TypeError, ValueError):  # not a date, or one without a zone
            return 0.0
    spent = _LIMIT.search(str(headers.get("ratelimit") or ""))
    return float(spent[1]) if spent else 0.0
