"""Ask data for its place and put it back there, where it knows: what else would be read and thrown away."""

from __future__ import annotations

import copy
from typing import Any

from tr_log import get_logger

logger = get_logger(__name__)

# Parts of the `datasets` library whose state leaves out what waits in their buffer: samples would be lost.
_LOSE_SAMPLES = ("BufferShuffled",)
_INNER = "ex_iterable"


class Place:
    """The place of a data set or loader in its pass, by its own `state_dict` and `load_state_dict`.

    Args:
        source: data that may have these methods.

    Attributes:
        is_known: whether it can tell its place, and all of it.
    """

    def __init__(self, source: Any) -> None:
        self._source, self._beginning = source, None
        has_methods = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
        self.is_known = has_methods and not _loses_samples(source)

    def take(self) -> Any:
        """Return the place after the last sample that was read; None where it is not known."""
        if not self.is_known:
            return None
        try:
            return copy.deepcopy(self._source.state_dict())
        except Exception as error:  # accelerate's loaders have the method, and not always a state
            self.is_known = False
            logger.info(
                "state_dict of %s raised %s (%s): a resumed run will read its data from the beginning of the epoch to "
                "its place",
                type(self._source).__name__,
                type(error).__name__,
                error,
            )
            return None

    def put_back(self, place: Any) -> None:
        """Go to a place: the next iteration begins there."""
        self._beginning = self.take()
        self._source.load_state_dict(place)

    def begin(self) -> None:
        """Have the next iteration begin at the beginning: some data would begin at a place put back for ever."""
        if self._beginning is not None:
            self._source.load_state_dict(self._beginning)
            self._beginning = None


def _loses_samples(source: Any) -> bool:
    inner = getattr(source, "_ex_iterable", None)
    while inner is not None:
        if type(inner).__name__.startswith(_LOSE_SAMPLES):
            logger.info(
                "the samples in the shuffle buffer of %s are not part of its state: a resumed run will read its data "
                "from the beginning of the pass to its place, and go on with the same samples",
                type(source).__name__,
            )
            return True
        inner = getattr(inner, _INNER, None)
    return False
