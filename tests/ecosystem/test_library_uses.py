"""What the sources of libraries use of transformers' Trainer is here, or refused in words; a page lists it."""

import ast
import inspect
from collections import defaultdict
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import transformers

import tr_core
from tr_core.testing import refused_hooks

PAGE = Path(__file__).parents[2] / "packages" / "tr-core" / "docs" / "what-libraries-use.md"
LIBRARIES = [
    "FlagEmbedding", "adaptive_trainer", "axolotl", "be_great", "cehrgpt", "chronos", "colpali_engine", "gliclass",
    "gliner", "realtabformer", "sentence_transformers", "setfit", "trl", "tsfm_public", "unsloth_zoo",
]  # fmt: skip
# Each object -> what it holds, by the name of the attribute.
HELD = {
    "trainer": ["args", "accelerator", "callback_handler", "state", "control"],
    "trainer.accelerator": ["state", "gradient_state", "dataloader_config"], "trainer.args": ["distributed_state"],
}  # fmt: skip
OWNERS = ["trainer", *(f"{above}.{name}" for above, names in HELD.items() for name in names)]
ROOTS = {"Trainer": "trainer", "Seq2SeqTrainer": "trainer", "TrainingArguments": "trainer.args",
         "Seq2SeqTrainingArguments": "trainer.args", "TrainerCallback": "a callback"}  # fmt: skip
KEPT = {("trainer.accelerator", "even_batches")}  # and read by nothing


def classes_in(tree):
    """Yield each class and the names of its bases, as the file that defines them has them."""
    renamed = {a.asname: a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [getattr(base, "value", base) if isinstance(base, ast.Subscript) else base for base in node.bases]
            names = [getattr(base, "attr", getattr(base, "id", "")) for base in bases]
            yield node, [renamed.get(name, name) for name in names]


def kinds_of(classes):
    """Return (library, class) -> what it is: what inherits from a class of transformers, and the mixins of that."""
    kinds, anywhere, before, own = {}, dict(ROOTS), -1, {(library, node.name) for library, node, _ in classes}
    while len(kinds) > before:
        before = len(kinds)
        for library, node, bases in classes:
            here = [base for base in bases if (library, base) in own and base != node.name]
            found = [kinds.get((library, base)) if base in here else anywhere.get(base) for base in bases]
            if kind := kinds.get((library, node.name)) or next(filter(None, found), None):
                kinds[library, node.name] = anywhere[node.name] = kind
                kinds.update({(library, base): kind for base in here if (library, base) not in kinds})
    return kinds


class Uses(ast.NodeVisitor):
    """Collect `(owner, name, how)` in one file. `args` and the like are the Trainer's in its classes and callbacks."""

    def __init__(self, library, kinds):
        self.library, self.kinds, self.kind, self.found = library, kinds, None, set()

    def visit_ClassDef(self, node):
        before, self.kind = self.kind, self.kinds.get((self.library, node.name))
        self.found |= {(self.kind, item.name, "overridden") for item in node.body if isinstance(item, ast.FunctionDef)}
        self.generic_visit(node)
        self.kind = before

    def visit_Attribute(self, node):
        self.found.add((self.owner(node.value), node.attr, "used" if isinstance(node.ctx, ast.Load) else "assigned"))
        self.generic_visit(node)

    def visit_Call(self, node):
        if getattr(node.func, "id", "") in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            self.found.add((self.owner(node.args[0]), node.args[1].value, "used"))
        self.generic_visit(node)

    def owner(self, node):
        if isinstance(node, ast.Call):
            return self.kind if getattr(node.func, "id", "") == "super" else None
        name = getattr(node, "attr", getattr(node, "id", ""))
        above = self.owner(node.value) if isinstance(node, ast.Attribute) else "trainer" if self.kind else None
        if name in HELD.get(above, ()):
            return f"{above}.{name}"
        if name.endswith(("trainer", "accelerator")):
            return "trainer" if name.endswith("trainer") else "trainer.accelerator"
        return self.kind if name == "self" and isinstance(node, ast.Name) else None


def uses_of(libraries):
    """Return (owner, name) -> how it is used -> the libraries that do."""
    paths = [(name, path) for name in libraries for path in Path(find_spec(name).origin).parent.rglob("*.py")]
    texts = [(name, path.read_text(encoding="utf-8")) for name, path in paths if "tests" not in path.parts]
    trees = [(name, ast.parse(text)) for name, text in texts if "rainer" in text]
    kinds = kinds_of([(name, *found) for name, tree in trees for found in classes_in(tree)])
    uses = defaultdict(lambda: defaultdict(set))
    for library, tree in trees:
        visitor = Uses(library, kinds)
        visitor.visit(tree)
        for owner, name, how in visitor.found:
            uses[owner, name][how].add(library)
    return uses


def owners(package, folder):
    args = package.TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    trainer = package.Trainer(model=torch.nn.Linear(1, 1), args=args, train_dataset=[{}])
    return {path: attrgetter(path)(type("", (), {"trainer": trainer})) for path in OWNERS}


def names_of(owner):
    """Return the attributes of an object of transformers, with those that its class only assigns later."""
    nodes = ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(type(owner)))))
    own = [node for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"]
    return {*dir(owner), *(node.attr for node in own if isinstance(node.ctx, ast.Store))}


def what_happens(owner, value, name, how):
    """Return what becomes of a name here; None if it is missing and no message says what to do."""
    if owner == "trainer" and "overridden" in how and name in refused_hooks():
        return f"refused: {refused_hooks()[name]}"
    try:
        found = getattr(value, name)
    except AttributeError as error:
        words = str(error).split(": ", 1)[-1].split("for a real one ")[-1]
        return None if "object has no attribute" in words else f"refused: {words}"
    is_idle = callable(found) and (inspect.getdoc(found) or "").startswith("Do nothing")
    called = "; an override is called" if "overridden" in how else ""
    return f"does nothing{called}" if is_idle or (owner, name) in KEPT else "is here"


@pytest.mark.skipif(not all(map(find_spec, LIBRARIES)), reason="needs the libraries of the session `ecosystem`")
def test_what_libraries_use_is_here_or_refused_in_words_and_the_page_lists_it(tmp_path):
    theirs, ours = owners(transformers, tmp_path), owners(tr_core, tmp_path)
    known = {owner: {name for name in names_of(value) if name[:2] != "__"} for owner, value in theirs.items()}
    used = {(owner, name): how for (owner, name), how in uses_of(LIBRARIES).items() if name in known.get(owner, ())}
    here = {key: what_happens(key[0], ours[key[0]], key[1], how) for key, how in used.items()}
    assert {key: dict(how) for key, how in used.items() if here[key] is None} == {}
    rows = [f"| {of} | `{name}` | {len(set().union(*how.values()))} | {', '.join(sorted(how))} | {here[of, name]} |"
            for (of, name), how in sorted(used.items(), key=lambda item: item[0])]  # fmt: skip
    table = "\n".join(["| of | name | libraries | how | here |", "|---|---|---|---|---|", *rows])
    assert table in PAGE.read_text(encoding="utf-8"), table
