"""Measure how good predicted tags are, and how good a lookup of each word's most frequent tag would be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from tagged_greek import Verse


def tag_metrics(predicted: np.ndarray, actual: np.ndarray, ignored: int = -100) -> dict[str, float]:
    """Return the share of words with the right tag, and the mean over the tags of their F1.

    Args:
        predicted: tag numbers, any shape.
        actual: the right ones, of the same shape; `ignored` where there is no word.
        ignored: what `actual` holds where there is no word.
    """
    is_word = actual != ignored
    predicted, actual = predicted[is_word], actual[is_word]
    scores = []
    for tag in np.unique(actual):
        hits = np.sum((predicted == tag) & (actual == tag))
        # F1 = 2 TP / (2 TP + FP + FN), and the sum below is TP + FP and TP + FN together.
        scores.append(2 * hits / (np.sum(predicted == tag) + np.sum(actual == tag)))
    return {"accuracy": float(np.mean(predicted == actual)), "f1": float(np.mean(scores))}


def lookup_accuracy(train: Sequence[Verse], test: Sequence[Verse]) -> float:
    """Return the accuracy of giving each word its most frequent tag in `train`, and of calling unknown ones nouns."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for verse in train:
        for word, tag in zip(verse.words, verse.tags, strict=True):
            counts[word][tag] += 1
    known = {word: counter.most_common(1)[0][0] for word, counter in counts.items()}
    pairs = [pair for verse in test for pair in zip(verse.words, verse.tags, strict=True)]
    return sum(known.get(word, "N-") == tag for word, tag in pairs) / len(pairs)
