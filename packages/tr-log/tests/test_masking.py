"""What is masked as a secret, by its name or its form, and what is shown."""

import pytest

from tr_log.masking import is_secret, is_secret_name, mask_secrets, mask_words, without_secrets

PASSWORD = "correct-horse-battery"
ADDRESS = "https://somebody:correct-horse-battery@hub.example/owner/name?token=correct-horse-battery"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("--hub_token", True), ("HF_TOKEN", True), ("WANDB_API_KEY", True), ("AWS_SECRET_ACCESS_KEY", True),
     ("--password", True), ("--pad_token", False), ("--eos_token_id", False), ("--max_new_tokens", False),
     ("--include_num_input_tokens_seen", False), ("--tokenizer_name", False), ("--key_length", False)],
)  # fmt: skip
def test_secrets_are_known_by_their_names(name, expected):
    assert is_secret_name(name) is expected


SECRETS = """private_key privateKey rsa_private_key api_key api_keys apiKey APIKey model/api_key aws_access_key_id
    passphrase ssh_passphrase authorization Authorization http_auth cookie wandb_key openai_key PGPASSWORD MYSQL_PWD
    hub_token token GITHUB_TOKEN_2 access_tokens db_password client_secret OPENAI_API_KEY_2 credentials"""
NO_SECRETS = """image_token image_token_id mask_token pad_token pad_token_id eos_token decoder_start_token_id num_tokens
    max_new_tokens token_type token_dropout tokenizer_name next_token samples_per_token use_cls_token lang_code_token
    PWD OLDPWD SSH_AUTH_SOCK private_key_path password_file token_url num_key_value_heads key label_key cache_key
    sort_keys author secretary"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_what_opens_a_service_is_a_secret_as_text_and_in_a_list(name):
    assert is_secret(name, PASSWORD)
    assert is_secret(name, [PASSWORD])
    assert not any(is_secret(name, value) for value in (None, True, "", []))


@pytest.mark.parametrize("name", NO_SECRETS.split())
def test_what_belongs_to_a_text_or_tells_of_a_secret_is_none(name):
    assert not is_secret(name, PASSWORD)


@pytest.mark.parametrize("value", ["<marker>", "[MARKER]", "</s>", "|", 50256, "50256"])
def test_a_special_token_of_any_name_is_no_secret(value):
    assert not is_secret("marker_token", value)
    assert is_secret("marker_password", value)


def test_secrets_are_left_out_at_every_depth():
    given = {
        "size": 8, "image_token": "<image>", "services": [{"api_key": PASSWORD, "name": "a"}, ({"private_key": 1},)],
        "headers": {"Authorization": f"Bearer {PASSWORD}", "Accept": "*/*"}, "db": f"postgres://me:{PASSWORD}@db/x",
    }  # fmt: skip
    assert without_secrets(given) == {
        "size": 8, "image_token": "<image>", "services": [{"name": "a"}, [{}]], "headers": {"Accept": "*/*"},
        "db": "postgres://***@db/x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"postgres://me:{PASSWORD}@db:5432/x", "postgres://***@db:5432/x"),
        (f"postgres://me:a/b#{PASSWORD}@db/x", "postgres://***@db/x"),
        (f"redis://:p@{PASSWORD}@db/0", "redis://***@db/0"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        (f"host=db user=me password={PASSWORD} dbname=x", "host=db user=me password=*** dbname=x"),
        (f"Driver=x;UID=me;PWD={PASSWORD};", "Driver=x;UID=me;PWD=***;"),
        (f"AccountName=x;AccountKey={PASSWORD};", "AccountName=x;AccountKey=***;"),
        (f"{{'api_key': '{PASSWORD}', 'a': 1}}", "{'api_key': '***', 'a': 1}"),
        (f'{{"private_key": "{PASSWORD}"}}', '{"private_key": "***"}'),
        (f"Config(wandb_key='{PASSWORD}', pad_token='<pad>')", "Config(wandb_key='***', pad_token='<pad>')"),
        (f"Authorization: Bearer {PASSWORD}", "Authorization: Bearer ***"),
        (f"-----BEGIN RSA PRIVATE KEY-----\n{PASSWORD}\n-----END RSA PRIVATE KEY----- x", "*** x"),
        ("max_tokens=5 token=[MASK] PWD=/home/me lr == 3", "max_tokens=5 token=[MASK] PWD=/home/me lr == 3"),
    ],
)
def test_secrets_within_a_text_are_masked_by_their_form(text, expected):
    assert mask_secrets(text) == expected
    assert mask_secrets(expected) == expected


def test_several_words_after_a_flag_of_secrets_are_masked():
    words = ["--api_keys", PASSWORD, PASSWORD, "--image_token", "image", "--hub_token", PASSWORD, "train.py"]
    assert mask_words(words) == [
        "--api_keys", "***", "***", "--image_token", "image", "--hub_token", "***", "train.py",
    ]  # fmt: skip


@pytest.mark.parametrize("piece", ["a", "a-", "a://b:", "a='b ", "x=@://", '="', "Bearer ", "authorization:"])
def test_a_hostile_text_is_masked_in_one_reading(piece):
    assert mask_secrets(piece * 20_000 + f" password={PASSWORD}").endswith(
        "***"
    )  # minutes, if it were read once a word


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
