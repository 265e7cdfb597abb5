"""Take the words of a command line apart: flags and their values, and what is left."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tr_args.conversion import FALSE_WORDS, TRUE_WORDS
from tr_args.errors import NOTHING, Problem
from tr_args.flags import FlagTable, Option, Shape


@dataclass
class Scan:
    """What a command line holds.

    Attributes:
        values: what was given, by the name it was given under; the last one where a name is repeated.
        config_files: files named by the configuration flag, in order.
        rest: words that belong to no known flag, in order.
        problems: flags without their value and the like.
    """

    values: dict[str, Any] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class Scanner:
    """Reads words by a table of flags. A flag is known only by its whole name."""

    def __init__(self, table: FlagTable, *, config_flag: str | None, foreign: Collection[str], origin: str) -> None:
        """Prepare to scan.

        Args:
            table: the flags.
            config_flag: the flag that names a configuration file, or None.
            foreign: flags that somebody else reads; they end a list of values.
            origin: where the words are from, for messages.
        """
        self._table = table
        self._config_flag = config_flag
        self._foreign = foreign
        self._origin = origin

    def scan(self, words: Sequence[str]) -> Scan:
        """Return what `words` hold."""
        result = Scan()
        position = 0
        while position < len(words):
            position = self._next(words, position, result)
        return result

    def _next(self, words: Sequence[str], position: int, result: Scan) -> int:
        """Take the flag at `position` with its values, or leave that word; returns the next position."""
        word = words[position]
        if word == "--":
            result.rest += words[position:]
            return len(words)
        flag, equals, inline = word.partition("=") if word.startswith("--") else (word, "", "")
        match = self._table.flag(flag)
        if match is None and flag != self._config_flag:
            result.rest.append(word)
            return position + 1
        # Not before it is a flag: looked for behind each word, the end of a long list costs time in its square.
        following = [inline] if equals else self._following(words, position + 1)
        if match is None or flag == self._config_flag:
            return position + self._take_config(flag, following, result) + (0 if equals else 1)
        option, negated = match
        if equals and not negated:
            result.values[option.name] = _joined(option, [inline])
            return position + 1
        if equals:
            result.problems.append(self._problem(flag, f"{flag} takes no value; write --{option.name}={inline}"))
            return position + 1
        return position + 1 + self._take(option, flag, following, negated, result)

    def _take_config(self, flag: str, following: list[str], result: Scan) -> int:
        if not following:
            result.problems.append(self._problem(flag, f"{flag} needs the path of a YAML, TOML or JSON file"))
            return 0
        result.config_files.append(following[0])
        return 1

    def _take(self, option: Option, flag: str, following: list[str], negated: bool, result: Scan) -> int:
        """Note the value of `option`; returns how many of the following words it took."""
        if negated:
            result.values[option.name] = False
            return 0
        if option.shape is Shape.SWITCH:
            following = following[:1] if following and following[0].lower() in TRUE_WORDS | FALSE_WORDS else []
        elif option.shape is Shape.ONE:
            following = following[:1]
        if following:
            result.values[option.name] = _joined(option, following)
        elif option.bare is not NOTHING:
            result.values[option.name] = option.bare
        else:
            message = f"{flag} needs a value; one that starts with -- is written {flag}=VALUE"
            result.problems.append(self._problem(flag, message))
        return len(following)

    def _following(self, words: Sequence[str], start: int) -> list[str]:
        """Return the words from `start` on that can be values."""
        end = start
        while end < len(words) and not self._is_flag(words[end]):
            end += 1
        return list(words[start:end])

    def _is_flag(self, word: str) -> bool:
        return word.startswith("--") or word in self._foreign or self._table.flag(word) is not None

    def _problem(self, flag: str, message: str) -> Problem:
        return Problem(flag, NOTHING, message, self._origin)


def _joined(option: Option, words: list[str]) -> Any:
    """Return one word as it is, several as a list or as the text of one."""
    if option.shape is Shape.MANY and option.separator is not None:
        return option.separator.join(words)
    return words if option.shape is Shape.MANY and len(words) > 1 else words[0]
