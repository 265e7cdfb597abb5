"""Find what was translated before and is most like a new message, as translators' programs do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from message_pairs import Pair, meaning


def nearest_pairs(memory: Sequence[Pair], messages: Sequence[str]) -> list[Pair]:
    """Return for each message the pair whose English is most like it, but not of the same meaning.

    Likeness is Dice's: twice the trigrams of characters in common, by the trigrams of both. Case does not count. Of
    equally near ones the first is taken. Messages of the memory itself get their neighbour, not themselves.

    Args:
        memory: at least two pairs, all of different meanings.
        messages: in English.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, pair in enumerate(memory):
        for trigram in _trigrams(pair.english):
            places[trigram].append(place)
    sizes = np.array([len(_trigrams(pair.english)) for pair in memory])
    known = {meaning(pair.english): place for place, pair in enumerate(memory)}
    found = []
    for message in messages:
        trigrams = _trigrams(message)
        shared = [place for trigram in trigrams for place in places.get(trigram, ())]
        likeness = np.bincount(np.array(shared, dtype=np.int64), minlength=len(memory)) / (sizes + len(trigrams))
        if (own := known.get(meaning(message))) is not None:
            likeness[own] = -1
        found.append(memory[int(likeness.argmax())])
    return found


def most_frequent_translation(memory: Sequence[Pair]) -> str:
    """Return the translation that stands in most pairs."""
    return Counter(pair.translation for pair in memory).most_common(1)[0][0]


def _trigrams(text: str) -> set[str]:
    padded = f"  {text.casefold()}  "
    return {padded[start : start + 3] for start in range(len(padded) - 2)}
