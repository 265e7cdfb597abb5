"""Translate without a model: by what is found in the training pairs. A model has to be better than that."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from message_pairs import Pair


def most_frequent_translations(train: Sequence[Pair], texts: Sequence[str]) -> list[str]:
    """Return for each text the translation that is the most frequent one among the training pairs."""
    return [Counter(pair.translation for pair in train).most_common(1)[0][0]] * len(texts)


def nearest_translations(train: Sequence[Pair], texts: Sequence[str]) -> list[str]:
    """Return for each text the translation of the training pair whose English is most like it.

    Likeness is Dice's: twice the trigrams of characters in common, by the trigrams of both. Case does not count.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    sizes = []
    for place, pair in enumerate(train):
        trigrams = _trigrams(pair.english)
        sizes.append(len(trigrams))
        for trigram in trigrams:
            places[trigram].append(place)
    found = []
    for text in texts:
        trigrams = _trigrams(text)
        common = Counter(place for trigram in trigrams for place in places.get(trigram, ()))
        nearest = max(common, key=lambda place: common[place] / (len(trigrams) + sizes[place]), default=0)
        found.append(train[nearest].translation)
    return found


def _trigrams(text: str) -> set[str]:
    padded = f"  {text.casefold()}  "
    return {padded[start : start + 3] for start in range(len(padded) - 2)}
