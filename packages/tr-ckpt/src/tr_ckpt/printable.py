"""Make text from outside fit to be shown: a terminal obeys some characters, and a reader does not see others."""

from __future__ import annotations


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return text with everything that is not printed as itself written as Python writes it: ESC as `\x1b`.

    That is what moves the cursor, sets colours, titles or the clipboard, turns the direction of writing or has no
    width, and half characters. Text that was made so stays as it is when it is made so again.

    Args:
        text: what is to be shown; its `str` is taken.
        lines: whether line breaks and tabs stay.
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )
