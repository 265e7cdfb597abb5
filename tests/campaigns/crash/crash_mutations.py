"""Break the code that must not be broken, and demand that the campaigns notice."""

from __future__ import annotations

import ast
import importlib
import inspect
import shutil
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from children import in_child
from crash_kills import damages, kills_at_places, kills_while_replacing
from crash_operations import LOCK, Event
from crash_order import MANIFEST, out_of_order
from crash_power_cut import Recording, cut, record, recoveries, recovery
from crash_session import Session
from crash_training import PARTS
from runner import Case, Tally

import tr_ckpt
from tr_ckpt import Checkpointer, files, reads, tensor_file

SOURCE = Path(tr_ckpt.__file__).parent
SYNCS = ("sync", "sync_folder")
LIMIT_S = 600  # of one mutation


@dataclass(frozen=True)
class Mutation:
    """A change of the code for the worse.

    Attributes:
        name: what is changed.
        apply: changes it in this process.
    """

    name: str
    apply: Callable[[], None]


@dataclass(frozen=True)
class Site:
    """A statement that syncs a file or folder.

    Attributes:
        path: of its source file.
        first: its first line.
        last: its last line.
        function: qualified name of the function around it; of the outermost, if that is inside another.
        text: what it says.
    """

    path: Path
    first: int
    last: int
    function: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(SOURCE)}, {self.function}: {self.text}"


def sites() -> list[Site]:
    """Return every statement of tr_ckpt that syncs."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for function, node in _statements(ast.parse(path.read_text(encoding="utf-8")), ()):
            call = node.value
            if isinstance(call, ast.Call) and _name(call.func) in SYNCS:
                last = node.end_lineno or node.lineno
                found.append(Site(path, node.lineno, last, ".".join(function), ast.unparse(node)))
    return found


def _statements(node: ast.AST, function: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.Expr]]:
    """Yield the statements that are calls, with the names of classes and of the outermost function around each."""
    inside = function and function[-1].endswith("()")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr):
            yield tuple(name.removesuffix("()") for name in function), child
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not inside:
            mark = "" if isinstance(child, ast.ClassDef) else "()"
            yield from _statements(child, (*function, child.name + mark))
        else:
            yield from _statements(child, function)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def without(site: Site) -> None:
    """Take a statement out of the running code: the function around it gets the code of one that lacks it."""

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.AST:
            taken = node.lineno == site.first and isinstance(node.value, ast.Call)
            return ast.copy_location(ast.Pass(), node) if taken else node

    module = ast.fix_missing_locations(Remove().visit(ast.parse(site.path.read_text(encoding="utf-8"))))
    code = compile(module, str(site.path), "exec")
    name = ".".join(("tr_ckpt", *site.path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    target: Any = importlib.import_module(name)
    for step in site.function.split("."):
        target = inspect.getattr_static(target, step)
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == step)
    getattr(target, "__func__", target).__code__ = code


def _copy_instead_of_renaming() -> None:
    rename = files.rename

    def copy(source: Path, target: Path) -> None:
        if not source.is_dir():
            rename(source, target)
            return
        files.make_folder(target)
        for path in sorted(source.iterdir()):
            if path.is_dir():
                copy(path, target / path.name)
            else:
                descriptor = files.create(target / path.name)
                files.write(descriptor, memoryview(path.read_bytes()))
                files.remove_file(path)  # here: other threads would wait for the recorder, which waits for this call
        files.remove_folder(source)

    files.rename = copy


def _manifest_first() -> None:
    write_file = files.write_file
    waiting: dict[Path, bytes] = {}

    def write(path: Path, blocks: Any, *others: Any, **named: Any) -> files.FileRecord:
        if path.name == MANIFEST:
            written = write_file(path, blocks, *others, **named)
            for other, content in waiting.items():
                write_file(other, [content])
            waiting.clear()
            return written
        if not any(folder.name.startswith(".tmp-writing-") for folder in path.parents):  # of no checkpoint
            return write_file(path, blocks, *others, **named)
        waiting[path] = b"".join(bytes(block) for block in blocks)
        return files.FileRecord(len(waiting[path]), files.hashlib.sha256(waiting[path]).hexdigest())

    files.write_file = write
    tensor_file.check = lambda path: None  # it is not there yet


def _hash_nothing() -> None:
    class Nothing:
        def update(self, data: Any) -> None:
            """Look at nothing."""

        def hexdigest(self) -> str:
            return "0" * 64

    for module in (files, reads):
        module.hashlib = types.SimpleNamespace(sha256=lambda *_: Nothing())  # pyright: ignore[reportAttributeAccessIssue]


def _forget(part: str) -> None:
    restore = Checkpointer.restore

    def without_part(self: Checkpointer, parts: Any, *others: Any, **named: Any) -> int | None:
        step = restore(self, {name: each for name, each in parts.items() if name != part}, *others, **named)
        if self.restored is not None and part in self.restored.states:  # as one that was just built has it
            states = {**self.restored.states, part: parts[part].state_dict()}
            self.restored = replace(self.restored, states=states)
        return step

    Checkpointer.restore = without_part


def mutations(on_the_path: set[Site]) -> list[Mutation]:
    """Return all, one for each statement that syncs among them."""
    return [
        *(Mutation(f"without {site.place}", partial(without, site)) for site in sites() if site in on_the_path),
        Mutation("a copy instead of the rename", _copy_instead_of_renaming),
        Mutation("the manifest first", _manifest_first),
        Mutation("hashing nothing", _hash_nothing),
        *(Mutation(f"not restoring {part}", partial(_forget, part)) for part in PARTS),
    ]


def visited(events: list[Event]) -> set[Site]:
    """Return the statements that synced in what was recorded, locks left out: a power cut ends who holds them."""
    locks = {event.inode for event in events if event.kind == "create" and LOCK in event.path}
    lines = {event.site for event in events if event.kind in SYNCS and event.inode not in locks}
    return {
        site
        for site in sites()
        if any(Path(path) == site.path and site.first <= line <= site.last for path, line in lines)
    }


def reduced(session: Session, folder: Path) -> Iterator[tuple[str, list[Case]]]:
    """Yield the campaigns, each cut down to what a change for the worse is most likely seen by."""
    folder.mkdir()
    ahead = Session(folder, True, alone=session.alone)

    def cuts(name: str, recording: Recording) -> list[Case]:
        told = [number + 1 for number, event in enumerate(recording.events) if event.kind == "promise"]
        renamed = [number + 1 for number, event in enumerate(recording.events) if event.kind == "rename"]
        points = [range(number, number + 1) for number in (*told, *renamed)]
        return [Case(name, partial(cut, ahead, recording, each)) for each in points]

    plain = record(folder / "recorded", "a run")
    yield "order of operations", [Case("order", lambda folder: _in_order(plain.events))]
    yield "power cut", cuts("power cut", plain)
    yield (
        "power cut after a kill",
        [fault for fault in recoveries(ahead) if "rename" in fault.label or "sync" in fault.label],
    )
    yield "kills while replacing", list(kills_while_replacing(ahead))[::11]
    yield "damage", [fault for fault in damages(ahead) if "middle" in fault.label]
    yield "kills at places", list(kills_at_places(ahead))[20:60:9]


def _in_order(events: list[Event]) -> str:
    return "; ".join(out_of_order(events))


def caught(session: Session, mutation: Mutation | None, folder: Path) -> list[str]:
    """Return the reduced campaigns that notice a mutation: that of the order, and the first other."""

    def work() -> list[str]:
        if mutation is not None:
            mutation.apply()
        noticed = []
        for name, faults in reduced(session, folder / "reduced"):
            for number, fault in enumerate(faults):
                place = folder / f"{name} {number}"
                place.mkdir()
                try:
                    came = fault.work(place)
                except Exception as error:
                    came = f"{type(error).__name__}: {error}"
                shutil.rmtree(place, ignore_errors=True)
                if came.problems if isinstance(came, Tally) else came:
                    noticed.append(name)
                    break
            if noticed and noticed[-1] != "order of operations":
                break
        return noticed

    outcome = in_child(work, LIMIT_S)
    if outcome.answer is None:
        raise RuntimeError(f"the mutated session {outcome}")
    return outcome.answer


def mutants(session: Session) -> Iterator[Case]:
    """Yield each mutation as a fault that the reduced campaigns must notice, and none, which they must not."""
    on_the_path = visited([*record(session.root / "recorded-sites", "a run").events, *recovery(session)])

    def unmutated(folder: Path) -> Tally:
        noticed = caught(session, None, folder)
        return Tally.of(f"without any mutation {noticed} notice something" if noticed else "", 0)

    yield Case("no mutation", unmutated)
    for mutation in mutations(on_the_path):

        def work(folder: Path, mutation: Mutation = mutation) -> Tally:
            noticed = caught(session, mutation, folder)
            if not noticed:
                return Tally.of("nothing notices it")
            return Tally(1, Counter({f"{mutation.name}: noticed by {', '.join(noticed)}": 1}))

        yield Case(mutation.name, work)
