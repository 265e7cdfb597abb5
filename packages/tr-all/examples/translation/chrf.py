"""Measure how close translations are to references, by the character n-grams that they have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

MAX_ORDER = 6
BETA = 2.0


def chrf(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return chrF of all translations together, from 0 to 100.

    Source: M. Popović, chrF: character n-gram F-score for automatic MT evaluation (2015). N-grams of 1 to 6 characters,
    spaces left out; precision and recall are those over all texts, each averaged over the lengths; recall has twice the
    weight (beta 2). As in sacrebleu, n-grams of a length do not count where the reference is too short for any.

    Args:
        translations: they.
        references: the right ones, in the same order.

    Raises:
        ValueError: there are not as many of the one as of the other.
    """
    precisions, recalls = [], []
    for order in range(1, MAX_ORDER + 1):
        matched = given = wanted = 0
        for translation, reference in zip(translations, references, strict=True):
            of_translation, of_reference = _ngrams(translation, order), _ngrams(reference, order)
            matched += (of_translation & of_reference).total()
            given += of_translation.total() if of_reference else 0
            wanted += of_reference.total()
        if given and wanted:
            precisions.append(matched / given)
            recalls.append(matched / wanted)
    if not sum(precisions):
        return 0.0
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    return 100 * (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


def _ngrams(text: str, order: int) -> Counter[str]:
    characters = "".join(text.split())
    return Counter(characters[start : start + order] for start in range(len(characters) - order + 1))
