"""What is masked as a secret, by its name or its form, and what is shown."""

import pytest

from tr_log.masking import is_secret_name, mask_secrets, mask_words

ADDRESS = "https://somebody:correct-horse-battery@hub.example/owner/name?token=correct-horse-battery"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("--hub_token", True), ("HF_TOKEN", True), ("WANDB_API_KEY", True), ("AWS_SECRET_ACCESS_KEY", True),
     ("--password", True), ("--pad_token", False), ("--eos_token_id", False), ("--max_new_tokens", False),
     ("--include_num_input_tokens_seen", False), ("--tokenizer_name", False), ("--key_length", False)],
)  # fmt: skip
def test_secrets_are_known_by_their_names(name, expected):
    assert is_secret_name(name) is expected


def test_what_is_no_secret_is_shown():
    words = [
        "train.py",
        "--lr",
        "1e-4",
        "--data=s3://bucket/x",
        "https://hub.example/a?b=c",
        "user@host",
        "sk-learn-run",
    ]
    assert mask_words(words) == words
    assert mask_secrets(f"a {ADDRESS} b") == "a https://***@hub.example/owner/name?token=*** b"
