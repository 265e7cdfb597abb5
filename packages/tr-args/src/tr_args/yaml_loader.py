"""Load YAML with the plain scalars of YAML 1.2, refusing duplicate keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from tr_args.errors import RefusedError, cut
from tr_log.bounded_text import BoundedYaml, ContentError, number

# The core schema of YAML 1.2. PyYAML follows 1.1, where `5e-5` is text, `no` is false and `1:30` is 90.
_CORE: tuple[tuple[str, str, Sequence[str]], ...] = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+0123456789."),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
)


class _CoreLoader(BoundedYaml, yaml.SafeLoader):  # pyright: ignore[reportIncompatibleMethodOverride] - a name
    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        text = str(self.construct_scalar(node))
        if text.startswith(("0o", "0x")):
            return int(text, 0)
        return (
            int(text)
            if node.tag.endswith(":int")
            else number(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        )

    def construct_truth(self, node: yaml.ScalarNode) -> bool:
        text = str(self.construct_scalar(node)).lower()
        if text not in ("true", "false"):  # tagged !!bool
            raise ContentError(
                f"has the truth value {text[:100]} on line {node.start_mark.line + 1}; needs true or false"
            )
        return text == "true"


for _name, _pattern, _first in _CORE:
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))
for _name in ("int", "float"):
    _CoreLoader.add_constructor(f"tag:yaml.org,2002:{_name}", _CoreLoader.construct_number)
_CoreLoader.add_constructor("tag:yaml.org,2002:bool", _CoreLoader.construct_truth)


def load(text: str) -> Any:
    """Return the content of the YAML document in `text`; None for an empty one.

    Raises:
        RefusedError: (a ValueError) it is not valid, holds several documents, has a key twice, or expands too far; says
            where.
    """
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except ContentError as error:
        raise RefusedError(str(error)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RefusedError(f"is not valid YAML: {where}{cut(str(error.problem or error))}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RefusedError(f"is not valid YAML: {cut(str(error))}") from None
