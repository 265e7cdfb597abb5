"""Translate without a model: by what was translated before. It is what a model is measured against."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from message_pairs import Pair


def nearest_pairs(memory: Sequence[Pair], messages: Sequence[str]) -> list[Pair]:
    """Return for each message the pair whose English is most like it.

    Likeness is Dice's: twice the trigrams of characters in common, by the trigrams of both. Case does not count. Of
    equally near ones the first is taken.

    Args:
        memory: translated messages.
        messages: in English.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, pair in enumerate(memory):
        for trigram in _trigrams(pair.english):
            places[trigram].append(place)
    sizes = np.array([len(_trigrams(pair.english)) for pair in memory])
    found = []
    for message in messages:
        trigrams = _trigrams(message)
        shared = [place for trigram in trigrams for place in places.get(trigram, ())]
        likeness = np.bincount(np.array(shared, dtype=np.int64), minlength=len(memory)) / (sizes + len(trigrams))
        found.append(memory[int(likeness.argmax())])
    return found


def most_frequent_translation(memory: Sequence[Pair]) -> str:
    """Return the translation that stands in most pairs."""
    return Counter(pair.translation for pair in memory).most_common(1)[0][0]


def _trigrams(text: str) -> set[str]:
    padded = f"  {text.casefold()}  "
    return {padded[start : start + 3] for start in range(len(padded) - 2)}
