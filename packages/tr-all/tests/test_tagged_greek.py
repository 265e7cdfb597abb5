"""Reading tagged verses, and measuring tags."""

import numpy as np
import pytest
from tag_metrics import lookup_accuracy, tag_metrics
from tagged_greek import Verse, installed_folder, read_splits

LINES = {
    "61-Mt": "010101 N- ----NSF- N-NSF Βίβλος Βίβλος βίβλος βίβλος\n"
    "010101 N- ----GSF- N-GSF γενέσεως γενέσεως γένεσις γένεσις\n"
    "010102 N- ----NSM- N-NSM Ἀβραὰμ Ἀβραὰμ Ἀβραάμ Ἀβραάμ\n",
    "69-Ga": "090101 N- ----NSM- N-NSM Παῦλος Παῦλος Παῦλος Παῦλος\n",
    "79-Heb": "190101 D- -------- ADV Πολυμερῶς, Πολυμερῶς πολυμερῶς πολυμερῶς\n",
}


@pytest.fixture
def books(install):
    install("py-sblgnt", {f"pysblgnt/sblgnt/{name}-morphgnt.txt": text.encode() for name, text in LINES.items()})


def test_verses_hold_words_without_punctuation_and_their_tags(books):
    assert read_splits(installed_folder()) == {
        "train": [Verse(["Βίβλος", "γενέσεως"], ["N-", "N-"]), Verse(["Ἀβραὰμ"], ["N-"])],
        "validation": [Verse(["Παῦλος"], ["N-"])],
        "test": [Verse(["Πολυμερῶς"], ["D-"])],
    }


def test_metrics_count_words_and_not_what_is_ignored():
    actual = np.array([[0, -100, 1, 1], [2, -100, -100, -100]])
    predicted = np.array([[0, 1, 1, 0], [2, 0, 0, 0]])
    # tag 0: precision 1/2, recall 1; tag 1: precision 1, recall 1/2; tag 2: both 1
    assert tag_metrics(predicted, actual) == pytest.approx({"accuracy": 3 / 4, "f1": (2 / 3 + 2 / 3 + 1) / 3})


def test_a_lookup_takes_the_most_frequent_tag_and_takes_the_unknown_for_nouns():
    train = [Verse(["a", "a", "a", "b"], ["V-", "V-", "N-", "D-"])]
    test = [Verse(["a", "b", "new", "b"], ["V-", "D-", "N-", "C-"])]
    assert lookup_accuracy(train, test) == 3 / 4
