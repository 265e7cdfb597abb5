"""Find the small faults that a file of Python can be given."""

from __future__ import annotations

import ast
import copy
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
METHODS = {
    "add_": "sub_",
    "sub_": "add_",
    "mul": "div",
    "mul_": "div_",
    "div": "mul",
    "div_": "mul_",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "sum": "mean",
    "mean": "sum",
    "update": "copy",
}
LINKS = {"abs", "clamp", "div", "div_", "mul", "mul_", "add_", "neg", "sqrt", "sqrt_", "square", "rsqrt", "t", "clone"}
# Arguments whose order does not matter, or whose first is a type.
UNORDERED = {"min", "max", "isclose", "equal", "gcd", "cast", "isinstance", "issubclass", "maximum", "minimum", "range"}
# What only speaks: to the log, to a person, to a reader.
SPOKEN = {"debug", "info", "warning", "warn", "error", "exception", "print", "once", "warn_once"}
# Keywords that decide speed, messages or checks of what cannot differ, or what only an accelerator can show.
QUIET_KEYWORDS = {
    "device",
    "strict",
    "non_blocking",
    "stacklevel",
    "help",
    "metadata",
    "name",
    "daemon",
    "encoding",
    "slots",
}
WORDS = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Change:
    """One fault: the text of a file between `start` and `end` replaced.

    Attributes:
        lines: first and last line of the statement (of its head, for a compound one) that holds it.
        static: whether it runs at import, where no test can be seen to run it.
    """

    path: str
    kind: str
    line: int
    start: int
    end: int
    old: str
    new: str
    lines: tuple[int, int]
    static: bool

    def apply(self, text: str) -> str:
        """Return the file's text with the fault in it."""
        return text[: self.start] + self.new + text[self.end :]

    def key(self, text: str) -> str:
        """Name the change: the same for as long as the file stays as it is."""
        return hashlib.sha256(f"{self.path}\n{self.apply(text)}".encode()).hexdigest()[:16]


class _Finder(ast.NodeVisitor):
    """Visit what a file does, not what it says: no docstrings, annotations, messages, log calls or `__repr__`."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.rows = text.splitlines(keepends=True)
        self.found: list[Change] = []
        self.functions = 0
        self.head: tuple[int, int] = (1, 1)

    def offset(self, line: int, column: int) -> int:
        """Turn a position of ast, whose columns are bytes, into one in the text."""
        return self.starts[line - 1] + len(self.rows[line - 1].encode()[:column].decode())

    def put(self, kind: str, node: ast.expr | ast.stmt, new: str | ast.expr) -> None:
        """Note that `node` may become `new`."""
        start = self.offset(node.lineno, node.col_offset)
        end = self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        if isinstance(new, ast.expr):
            written = ast.unparse(ast.fix_missing_locations(new))
            loose = isinstance(new, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp | ast.IfExp)
            new = f"({written})" if loose else written
        static = self.functions == 0
        old = self.text[start:end]
        self.found.append(Change(self.path, kind, node.lineno, start, end, old, new, self.head, static))

    def visit(self, node: ast.AST) -> None:
        """Remember the head of the statement that what follows belongs to."""
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno or node.lineno
            self.head = (node.lineno, max(last, node.lineno))
        super().visit(node)

    def each(self, nodes: list) -> None:
        """Visit several."""
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit defaults and body."""
        if node.name in WORDS:
            return
        # A default takes effect when the function runs: its lines are those of the body.
        self.head = (node.body[0].lineno, node.end_lineno or node.lineno)
        self.functions += 1
        self.each([*node.args.defaults, *node.args.kw_defaults])
        self.each(node.body)
        self.functions -= 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visit the body."""
        self.each(node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Visit the body, and take none of the arguments."""
        self.visit(node.body)

    def visit_Import(self, node: ast.Import) -> None:
        """Leave imports."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave formatted texts."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Do not raise."""
        if node.exc is not None:
            self.put("statement dropped", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        """Go on."""
        self.put("statement dropped", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        """Go on with the rest."""
        self.put("statement dropped", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drop calls."""
        if isinstance(node.value, ast.Call) and not _speaks(node.value):
            self.put("statement dropped", node, "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value; drop what is assigned to an attribute or an entry."""
        if isinstance(node.target, ast.Attribute | ast.Subscript) and node.value is not None:
            self.put("statement dropped", node, "pass")
        self.each([node.value])

    def visit_Assign(self, node: ast.Assign) -> None:
        """Drop what is assigned to attributes and entries."""
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.put("statement dropped", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Drop it, and swap its operator."""
        self.put("statement dropped", node, "pass")
        if other := ARITHMETIC.get(type(node.op)):
            changed = ast.unparse(ast.AugAssign(node.target, other(), node.value))
            self.put("operator", node, changed)
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        """Negate the condition."""
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """Negate the condition."""
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
            self.generic_visit(node)
        else:
            self.each(node.body)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate the condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Negate the conditions."""
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return  # visit_UnaryOp does it
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and not isinstance(test.ops[0], ast.Lt | ast.Gt):
            return  # the other comparison is its negation, or nearly
        self.put("condition negated", test, ast.UnaryOp(ast.Not(), test))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop `not` and signs."""
        self.put("not or sign dropped", node, node.operand)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Swap `and` and `or`, and drop an operand."""
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.put("and, or", node, ast.BoolOp(other, node.values))
        for number in range(len(node.values)):
            rest = node.values[:number] + node.values[number + 1 :]
            self.put("operand dropped", node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Swap the comparison."""
        for number, op in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[number] = COMPARISONS[type(op)]()
            self.put("comparison", node, changed)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Swap the operator, and drop a factor or a term."""
        if any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right)):
            return
        union = isinstance(node.op, ast.BitOr) and ast.unparse(node.left).split(".")[-1][:1].isupper()
        if (other := ARITHMETIC.get(type(node.op))) and not union:
            self.put("operator", node, ast.BinOp(node.left, other(), node.right))
            self.put("factor or term dropped", node, node.left)
            if isinstance(node.op, ast.Add | ast.Mult):
                self.put("factor or term dropped", node, node.right)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap arguments, drop a keyword, call the opposite function, drop a link of a chain."""
        if _speaks(node):
            return
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if len(node.args) > 1 and name not in UNORDERED and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            swapped = ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
            self.put("arguments swapped", node, swapped)
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in QUIET_KEYWORDS:
                rest = [other for other in node.keywords if other is not keyword]
                self.put("keyword dropped", node, ast.Call(node.func, node.args, rest))
        if isinstance(node.func, ast.Name) and name in NAMES:
            self.put("function", node.func, ast.Name(NAMES[name]))
        if isinstance(node.func, ast.Attribute):
            if name in METHODS:
                self.put("function", node.func, ast.Attribute(node.func.value, METHODS[name]))
            if name in LINKS and not isinstance(node.func.value, ast.Name | ast.Constant):
                self.put("factor or term dropped", node, node.func.value)
        self._visit_arguments(node, name)

    def _visit_arguments(self, node: ast.Call, name: str) -> None:
        self.visit(node.func)
        self.each(node.args[:1] if name in ("isinstance", "issubclass") else node.args)
        self.each([keyword.value for keyword in node.keywords if keyword.arg not in QUIET_KEYWORDS])

    def visit_Constant(self, node: ast.Constant) -> None:
        """Take another number or truth value."""
        value = node.value
        if isinstance(value, bool):
            self.put("constant", node, repr(not value))
        elif isinstance(value, int):
            self.put("constant", node, repr(value + 1))
        elif isinstance(value, float):
            self.put("constant", node, repr(value * 2 if value else 1.0))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _speaks(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in SPOKEN or "logger" in ast.unparse(node.func)


def changes_of(path: str, text: str) -> list[Change]:
    """Return every change of a file that leaves it valid and not the same."""
    finder = _Finder(path, text)
    tree = ast.parse(text)
    finder.visit(tree)
    same = ast.dump(tree)
    kept: dict[str, Change] = {}
    for change in finder.found:
        mutated = change.apply(text)
        try:
            differs = ast.dump(ast.parse(mutated)) != same
        except SyntaxError:
            continue
        if differs:
            kept.setdefault(mutated, change)
    return list(kept.values())


def sample(texts: dict[str, str], number: int, seed: int) -> list[Change]:
    """Choose `number` changes, as many of each file as there are, and in a file as many of each kind.

    The choice in one file depends on that file and the seed alone, so that it stays when another file changes.
    """
    orders = [_order(path, text, seed) for path, text in sorted(texts.items())]
    random.Random(seed).shuffle(orders)
    rounds = (change for row in zip_longest(*orders) for change in row if change is not None)
    return [change for _, change in zip(range(number), rounds, strict=False)]


def _order(path: str, text: str, seed: int) -> Iterator[Change]:
    chance = random.Random(f"{seed}:{path}")
    kinds: dict[str, list[Change]] = {}
    for change in changes_of(path, text):
        kinds.setdefault(change.kind, []).append(change)
    groups = list(kinds.values())
    chance.shuffle(groups)
    for group in groups:
        chance.shuffle(group)
    return (change for row in zip_longest(*groups) for change in row if change is not None)
