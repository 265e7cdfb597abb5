"""Mask access tokens and passwords in what is shown: one rule for arguments, trackers, logs, errors and commands.

A value is a secret by the name it has (`is_secret`), a part of a text by its form (`mask_secrets`). Names of tokens of
a text, such as `image_token` and `num_tokens`, are not secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"

# Prefixes of the tokens of common services, with their least lengths.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}|sk-(?:proj-|ant-|or-)[\w-]{20,}|sk-[A-Za-z0-9]{20,}"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}"
    r"|AIza[\w-]{35}|nvapi-[\w-]{20,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|wandb_v1_\w{20,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}|hooks\.slack\.com/services/[\w/-]+)"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# A password may hold any character but a blank; what follows a host's colon and is a number is its port.
_IN_ADDRESS = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{1,20}://)"
    r"(?:[^\s/@'\"?#:]*:(?!\d+(?:[/?#]))[^\s'\"]{0,200}@|[^\s/@'\"?#]+@)"
)
_IN_QUERY = re.compile(r"(?P<name>[?&;]\s?(?:key|sig|signature|x-amz-signature|pwd)=)[^&;\s'\"#]+", re.I)
_HEADER = re.compile(
    r"(?P<name>\bAuthorization['\"]?\s*[:=]\s*['\"]?(?:(?:Bearer|Basic|Digest|Token)\s+)?+)[\w.~+/=-]{6,}"
    r"|(?P<bearer>\bBearer\s+)[\w.~+/=-]{16,}",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"(?<![\w.])(?P<name>[A-Za-z_][\w.-]{0,60}+)(?P<sign>['\"]\s?:\s?|\s?=(?!=)\s?)"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'&;,)\]}#]+)"
)

_SECRETS = (
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "passphrases", "passcode", "credential",
    "credentials", "authorization", "apikey", "apikeys", "accesskey", "secretkey", "privatekey", "authtoken",
    "accesstoken",
)  # fmt: skip
_SECRET_AT_THE_END = frozenset({"auth", "bearer", "cookie", "cookies"})
# What makes a key one to a service.
_KEYS = frozenset(
    {"api", "access", "private", "secret", "account", "storage", "auth", "ssh", "encryption", "signing", "deploy",
     "subscription", "service", "license", "licence", "wandb", "hf", "huggingface", "openai", "anthropic", "aws",
     "azure", "gcp", "google", "github", "comet", "neptune", "clearml", "swanlab", "dagshub", "mlflow", "trackio"}
)  # fmt: skip
# What makes tokens, of which there are several, those to a service.
_TOKENS = frozenset({"api", "access", "auth", "refresh", "bearer", "hub", "hf", "secret", "session"})
# What makes a token one of a text or of a model's input.
_OF_A_VOCABULARY = frozenset(
    {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "start", "end", "special", "image", "img", "audio", "video",
     "vision", "patch", "boi", "eoi", "boa", "eoa", "eot", "eod", "bod", "class", "register", "distillation", "fill",
     "blank", "placeholder", "delimiter", "space", "line", "newline", "break", "lang", "language", "code", "task",
     "prompt", "query", "question", "context", "prefix", "suffix", "middle", "next", "last", "first", "new", "one",
     "per", "to", "group", "entity", "speech", "predicted", "added", "think", "tool", "row", "frame", "max", "num"}
)  # fmt: skip
_AFTER_A_TOKEN = frozenset({"read", "write", "value", "prod", "dev", "test", "staging"})
# Names that end so tell something of a secret, and not the secret.
_ABOUT = frozenset(
    {"file", "path", "dir", "folder", "name", "names", "type", "types", "length", "len", "size", "dim", "count", "env",
     "var", "url", "uri", "endpoint", "field", "column", "index", "policy", "ttl", "expiry"}
)  # fmt: skip
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# The text that a tokenizer has for a special token: `<image>`, `[MASK]`, `|`.
_SPECIAL_TOKEN = re.compile(r"[<\[{|].*|.*[>\]}|]|\W{1,3}|\d+", re.DOTALL)


def mask_secrets(text: str) -> str:
    """Replace likely tokens, what is assigned to the name of a secret, and the user part of addresses, by `***`."""
    text = _PRIVATE_KEY.sub(MASK, _IN_ADDRESS.sub(rf"\g<scheme>{MASK}@", text))
    text = _HEADER.sub(rf"\g<name>\g<bearer>{MASK}", _IN_QUERY.sub(rf"\g<name>{MASK}", text))
    return _TOKEN.sub(MASK, _ASSIGNED.sub(_assignment, text))


def is_secret_name(name: str) -> bool:
    """Whether a flag, an argument or a variable of this name holds a secret: `--hub_token`, `WANDB_API_KEY`."""
    return bool(_kind(name))


def is_secret(name: str, value: Any) -> bool:
    """Whether the value with this name is a secret.

    Nothing, an empty value and a truth value are none. The value of a token is text, and not that of a special token.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str | bytes | Mapping | list) and not value):
        return False
    kind = _kind(name)
    if kind != "token":
        return bool(kind)
    return not isinstance(value, int | float) and not (isinstance(value, str) and _SPECIAL_TOKEN.fullmatch(value))


def without_secrets(value: Any) -> Any:
    """Return a value without the secrets in its mappings and lists, at every depth, and with its texts masked."""
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, Mapping):
        return {key: without_secrets(inner) for key, inner in value.items() if not is_secret(str(key), inner)}
    if isinstance(value, list | tuple | set | frozenset):
        return [without_secrets(inner) for inner in value]
    return value


def mask_variable(name: str, value: Any) -> str:
    """Return the value of a variable or an argument as text for display: `***` if it is a secret."""
    return MASK if is_secret(name, value) else mask_secrets(str(value))


def mask_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command line, with the values of secret flags masked, `--flag X` and `--flag=X`."""
    shown: list[str] = []
    flag = ""
    for word in words:
        if flag and not word.startswith("--"):
            shown.append(mask_variable(flag, word))
            flag = flag if flag.endswith("s") else ""  # several may follow `--api_keys`
            continue
        name, equals, value = word.partition("=")
        shown.append(f"{mask_secrets(name)}={mask_variable(name, value)}" if equals else mask_secrets(word))
        flag = word if word.startswith("-") and not equals and is_secret_name(word) else ""
    return shown


def _assignment(match: re.Match[str]) -> str:
    name, sign, value = match["name"], match["sign"], match["value"]
    quote = value[0] if value[0] in "'\"" else ""
    return f"{name}{sign}{quote}{MASK}{quote}" if is_secret(name, value.strip("'\"")) else match[0]


def _kind(name: str) -> str:
    """Return `token`, whose value decides too, `secret`, or nothing for a name that means no secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return ""
    for before, at in zip(["", *words], range(len(words)), strict=False):
        if _is_secret_word(before, words[at], words[at + 1 :]):
            return "secret"
        if _is_token(before, words[at], words[at + 1 :]):
            return "token"
    return ""


def _is_secret_word(before: str, word: str, after: list[str]) -> bool:
    if word in ("key", "keys"):
        return before in _KEYS and (after != ["id"] or before == "access")
    if word in _SECRET_AT_THE_END:
        return not after
    return word.endswith(_SECRETS) or (word == "pwd" and before != "")  # PWD is the working directory


def _is_token(before: str, word: str, after: list[str]) -> bool:
    if word == "tokens":
        return before in _TOKENS
    of_a_service = word == "token" and before not in _OF_A_VOCABULARY
    return of_a_service and all(each.isdigit() or each in _AFTER_A_TOKEN for each in after)
