"""Hold an access token so that nothing shows it by accident."""

from __future__ import annotations

from typing import NoReturn
from urllib.parse import quote


class Secret:
    """A text that no `repr`, message, pickle or display of local variables gives away.

    Args:
        text: the token; empty where there is none.
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
        """Return the text; keep it in no variable."""
        return self._text

    def hide_in(self, text: str) -> str:
        """Return `text` with the token, however it is quoted there, replaced by `<token>`."""
        if not self._text:
            return text
        for form in (self._text, repr(self._text)[1:-1], quote(self._text, safe="")):
            text = text.replace(form, "<token>")
        return text
