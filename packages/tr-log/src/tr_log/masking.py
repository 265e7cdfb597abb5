"""Mask access tokens and passwords in what is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"

# Prefixes of the tokens of common services, with their least lengths.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}|sk-(?:proj-|ant-|or-)[\w-]{20,}|sk-[A-Za-z0-9]{20,}"
    r"|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16})"
)
_IN_ADDRESS = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{1,20}://)[^\s/@'\"?#]+@")
_IN_QUERY = re.compile(
    r"(?P<name>[?&](?:access_?token|token|api_?key|key|password|secret|sig|signature|x-amz-signature)=)[^&\s'\"#]+",
    re.I,
)
_SECRET_WORDS = frozenset(
    {"token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey"}
)
_KEYS = frozenset({"api", "access", "private", "secret", "account", "storage"})
_OF_A_VOCABULARY = frozenset({"pad", "eos", "bos", "unk", "mask", "sep", "cls", "start", "end", "special", "image"})


def mask_secrets(text: str) -> str:
    """Replace likely tokens, and the user part of addresses, by `***`."""
    text = _IN_ADDRESS.sub(rf"\g<scheme>{MASK}@", text)
    return _TOKEN.sub(MASK, _IN_QUERY.sub(rf"\g<name>{MASK}", text))


def is_secret_name(name: str) -> bool:
    """Whether a flag or variable of this name holds a secret: `--hub_token`, `WANDB_API_KEY`."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    for before, word in zip(["", *words], words, strict=False):
        if (word in _SECRET_WORDS and before not in _OF_A_VOCABULARY) or (word == "key" and before in _KEYS):
            return words[-1] != "id"
    return False


def mask_variable(name: str, value: str) -> str:
    """Return the value of a variable or an argument for display: `***` if its name means a secret."""
    return MASK if value and is_secret_name(name) else mask_secrets(value)


def mask_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command line, with the values of secret flags masked, `--flag X` and `--flag=X`."""
    shown: list[str] = []
    flag = ""
    for word in words:
        name, equals, value = word.partition("=")
        if flag and not word.startswith("--"):
            shown.append(MASK)
        elif equals:
            shown.append(f"{mask_secrets(name)}={mask_variable(name, value)}")
        else:
            shown.append(mask_secrets(word))
        flag = word if word.startswith("-") and not equals and is_secret_name(word) else ""
    return shown
