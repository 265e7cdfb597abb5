"""Find the help text of each field: what its metadata says, or the text that stands under it."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

from tr_args.schema import FieldSpec


def field_help(spec: FieldSpec) -> str:
    """Return the help text of a field on one line; empty if there is none."""
    text = spec.metadata.get("help") or _texts_under_fields(spec.owner).get(spec.name, "")
    return " ".join(text.split())


@functools.cache
def _texts_under_fields(cls: type) -> dict[str, str]:
    """Return the string literals that stand under the fields of `cls`; none where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    definition = ast.parse(source).body[0]
    if not isinstance(definition, ast.ClassDef):
        return {}
    texts: dict[str, str] = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = text
    return texts
