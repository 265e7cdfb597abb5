"""What trackers by callbacks of transformers say where something is not installed, and that nothing is imported."""

import importlib.machinery
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tr_log import transformers_trackers

ARGUMENTS = SimpleNamespace(output_dir="out")
LIBRARIES = {
    "azure_ml": ("azureml.core.run", "azureml-sdk"),
    "clearml": ("clearml", "clearml"),
    "codecarbon": ("codecarbon", "codecarbon"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "dagshub": ("dagshub", "dagshub mlflow"),
    "dvclive": ("dvclive", "dvclive"),
    "flyte": ("flytekit", "flytekit"),
    "neptune": ("neptune", "neptune"),
    "swanlab": ("swanlab", "swanlab"),
    "trackio": ("trackio", "trackio"),
}


@pytest.fixture
def installed(monkeypatch):
    """Return a set of the modules that are found, beside those that have nothing to do with trackers."""
    names, find = set(), transformers_trackers.find_spec
    top = {
        "accelerate",
        "azureml",
        "transformers",
        "mlflow",
        *(module.partition(".")[0] for module, _ in LIBRARIES.values()),
    }

    def found(name):
        if name.partition(".")[0] not in top:
            return find(name)
        return importlib.machinery.ModuleSpec(name, None) if name in names else None

    monkeypatch.setattr(transformers_trackers, "find_spec", found)
    return names


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_missing_is_named_with_how_to_install_it(installed, name):
    install = LIBRARIES[name][1]
    with pytest.raises(
        ImportError, match=f"names '{name}', .*`pip install transformers {install}`, or take {name} out of report_to"
    ):
        getattr(transformers_trackers, name)(ARGUMENTS)


@pytest.mark.parametrize("name", LIBRARIES)
def test_without_transformers_its_callbacks_say_so(installed, name):
    installed |= {LIBRARIES[name][0], "mlflow"}
    with pytest.raises(ImportError, match=f"names '{name}', which has a callback in transformers only.*not installed"):
        getattr(transformers_trackers, name)(ARGUMENTS)


def test_a_module_of_a_package_that_is_missing_is_missing():
    assert not transformers_trackers._is_installed("no_such_package.core.run")


def test_kubeflow_needs_a_job_of_it(installed, monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    with pytest.raises(ImportError, match="KUBEFLOW_TRAINER_SERVER_URL is not set, which a TrainJob"):
        transformers_trackers.kubeflow(ARGUMENTS)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://status")
    with pytest.raises(ImportError, match="`pip install transformers`"):
        transformers_trackers.kubeflow(ARGUMENTS)


def test_the_callback_is_that_of_transformers_and_what_it_cannot_do_is_an_import_error(installed, monkeypatch):
    installed |= {"trackio", "comet_ml", "transformers"}

    def too_old():
        raise RuntimeError("CometCallback requires comet-ml>=3.43.2")

    table = {"trackio": lambda: "the callback", "comet_ml": too_old}
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers.integrations", SimpleNamespace(INTEGRATION_TO_CALLBACK=table))
    assert transformers_trackers.trackio(ARGUMENTS) == "the callback"
    with pytest.raises(ImportError, match="names 'comet_ml': CometCallback requires comet-ml>=3.43.2"):
        transformers_trackers.comet_ml(ARGUMENTS)


def test_codecarbon_finds_the_output_folder(installed, monkeypatch, tmp_path):
    installed |= {"codecarbon", "transformers"}
    seen = []
    callback = SimpleNamespace(on_init_end=lambda args, *_, **__: seen.append(Path(args.output_dir).is_dir()))
    table = {"codecarbon": lambda: callback}
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers.integrations", SimpleNamespace(INTEGRATION_TO_CALLBACK=table))
    args = SimpleNamespace(output_dir=str(tmp_path / "a" / "b"))
    found = transformers_trackers.codecarbon(args)
    assert not Path(args.output_dir).exists()
    found.on_init_end(args, None, None)
    assert seen == [True]


def test_entry_points_and_functions_are_the_same():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["tr.trackers"]
    ours = {name for name, value in points.items() if value == f"tr_log.transformers_trackers:{name}"}
    assert ours == {*LIBRARIES, "kubeflow"}


@pytest.mark.parametrize("name", ["clearml", "comet_ml", "dvclive", "swanlab", "trackio"])
def test_an_extra_installs_what_the_callback_needs(name):
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    extra = tomllib.loads(text)["project"]["optional-dependencies"][name]
    assert [requirement.partition(">")[0] for requirement in extra] == ["transformers", LIBRARIES[name][0]]


def test_importing_it_imports_no_library():
    unwanted = ["transformers", "torch", *(module.partition(".")[0] for module, _ in LIBRARIES.values())]
    code = f"import sys, tr_log.transformers_trackers; print([n for n in {unwanted} if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[]"
