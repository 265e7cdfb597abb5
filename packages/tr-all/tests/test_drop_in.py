"""`trainer drop-in` runs a script with this Trainer where the script imports that of transformers."""

import importlib
import sys
from types import ModuleType

import pytest

from tr_all.drop_in import COPIES, REPLACED, drop_in, main


@pytest.fixture
def transformers(monkeypatch):
    """A package with the names that are replaced, for environments without the real one."""
    package = ModuleType("transformers")
    for name, names in REPLACED.items():
        inner = ModuleType(name)
        for each in names:
            setattr(inner, each, f"their {each}")
            if each != "DEFAULT_CALLBACKS":
                setattr(package, each, f"their {each}")
        monkeypatch.setitem(sys.modules, name, inner)
    monkeypatch.setitem(sys.modules, "transformers", package)
    return package


def test_names_are_ours_inside_the_block_and_theirs_after_it(transformers):
    import tr_core

    with drop_in():
        assert transformers.Trainer is tr_core.Trainer
        assert sys.modules["transformers.trainer"].Trainer is tr_core.Trainer
        assert tr_core.DefaultFlowCallback in sys.modules["transformers.trainer"].DEFAULT_CALLBACKS
        assert not hasattr(transformers, "DEFAULT_CALLBACKS")
    assert transformers.Trainer == "their Trainer"
    assert sys.modules["transformers.trainer_callback"].TrainerState == "their TrainerState"


def test_a_package_that_replaces_itself_while_a_module_of_it_is_imported_has_our_names(tmp_path, monkeypatch):
    import tr_core

    folder = tmp_path / "transformers"
    folder.mkdir()
    theirs = {module: "".join(f"{name} = 'theirs'\n" for name in names) for module, names in REPLACED.items()}
    (folder / "__init__.py").write_text("".join(theirs.values()))
    for module, names in theirs.items():
        (folder / f"{module.partition('.')[2]}.py").write_text(names)
    with (folder / "trainer.py").open("a") as file:
        file.write("import sys, types\nagain = types.ModuleType('transformers')\n")
        file.write("vars(again).update(vars(sys.modules['transformers']))\nsys.modules['transformers'] = again\n")
    # Every name that the block imports is noted here, so that it is gone after the test.
    for name in ["transformers", *REPLACED, *(name for name in sys.modules if name.startswith("transformers."))]:
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    with drop_in():
        assert sys.modules["transformers"].Trainer is tr_core.Trainer
    assert sys.modules["transformers"].Trainer == "theirs"


def test_names_are_put_back_after_an_error(transformers):
    with pytest.raises(KeyError), drop_in():
        raise KeyError
    assert transformers.Seq2SeqTrainer == "their Seq2SeqTrainer"


def test_a_copy_in_a_library_is_replaced_when_it_is_imported_in_the_block(transformers, tmp_path, monkeypatch):
    import tr_args

    folder = tmp_path / "library_of_copies"
    folder.mkdir()
    (folder / "__init__.py").write_text("from library_of_copies.inner import HfArgumentParser\n")
    (folder / "inner.py").write_text("class HfArgumentParser:\n    pass\n")
    monkeypatch.setitem(COPIES, "library_of_copies.inner", {"HfArgumentParser": "tr_args", "Gone": "tr_args"})
    monkeypatch.setitem(COPIES, "library_of_copies.missing", {"HfArgumentParser": "tr_args"})
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    with drop_in():
        library = importlib.import_module("library_of_copies")
        assert library.HfArgumentParser is tr_args.HfArgumentParser
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("library_of_copies.missing")
    assert sys.meta_path == finders
    assert library.inner.HfArgumentParser.__module__ == "library_of_copies.inner"
    for name in ("library_of_copies", "library_of_copies.inner"):
        monkeypatch.delitem(sys.modules, name)


def test_the_command_runs_a_script_with_its_arguments(transformers, tmp_path, capsys, monkeypatch):
    script = tmp_path / "script.py"
    imports = "import sys\nimport beside\nfrom transformers import Trainer\n"
    script.write_text(imports + "print(Trainer.__module__, sys.argv[1:])\n")
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["trainer"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([str(script), "--learning_rate", "1e-3"]) == 0
    assert capsys.readouterr().out.strip() == "tr_core.trainer ['--learning_rate', '1e-3']"


def test_a_missing_script_is_named(transformers, capsys):
    with pytest.raises(SystemExit):
        main(["nowhere.py"])
    assert "there is no file nowhere.py" in capsys.readouterr().err


def test_without_transformers_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError), drop_in():
        pass


def test_the_help_lists_what_is_replaced(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for names in REPLACED.values() for name in names)
