"""Report to the trackers that only transformers has callbacks for, by its own callbacks.

An entry point in the group `tr.trackers` names each function, which takes the training arguments. transformers is
imported when a name is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def _tracker(name: str, *modules: str, install: str = "", by_name_only: bool = False) -> Callable[[Any], Any]:
    """Return the function that builds transformers' callback of a name.

    Args:
        name: the name in `report_to`.
        modules: what it imports.
        install: what to install for that; empty is the name.
        by_name_only: `report_to="all"` does not mean it.
    """

    def build(args: Any) -> Any:
        needed = [package for package in (install or name).split() if package]
        if not all(map(_is_installed, modules)):
            raise ImportError(
                f"report_to names {name!r}, which needs {' and '.join(needed)}, and not all of it is installed: run "
                f"`pip install transformers {' '.join(needed)}`, or take {name} out of report_to",
                name=modules[0],
            )
        if not _is_installed("transformers"):
            raise ImportError(
                f"report_to names {name!r}, which has a callback in transformers only, and that is not installed: run "
                f"`pip install transformers`, or take {name} out of report_to",
                name="transformers",
            )
        from transformers.integrations import INTEGRATION_TO_CALLBACK  # type: ignore[import-not-found]

        try:
            return INTEGRATION_TO_CALLBACK[name]()
        except RuntimeError as error:  # too old, or not usable here
            raise ImportError(f"report_to names {name!r}: {error}", name=name) from error

    vars(build).update(by_name_only=by_name_only)
    return build


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a package above it is missing, or has no spec
        return False


def kubeflow(args: Any) -> Any:
    """Return transformers' callback for the status of a Kubeflow TrainJob.

    Raises:
        ImportError: transformers is not installed, or this process is not in such a job.
    """
    if not os.environ.get("KUBEFLOW_TRAINER_SERVER_URL"):
        raise ImportError(
            "report_to names 'kubeflow', and KUBEFLOW_TRAINER_SERVER_URL is not set, which a TrainJob with the feature "
            "TrainJobRuntimeStatus sets; take kubeflow out of report_to, or start the training by one",
            name="kubeflow",
        )
    return _tracker("kubeflow")(args)


def codecarbon(args: Any) -> Any:
    """Return transformers' callback for CodeCarbon; its library wants the output folder before training makes it.

    Raises:
        ImportError: transformers or codecarbon is not installed.
    """
    callback = _tracker("codecarbon", "codecarbon")(args)
    begin = callback.on_init_end

    def on_init_end(args: Any, *given: Any, **further: Any) -> Any:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        return begin(args, *given, **further)

    callback.on_init_end = on_init_end
    return callback


azure_ml = _tracker("azure_ml", "azureml.core.run", install="azureml-sdk")
clearml = _tracker("clearml", "clearml")
comet_ml = _tracker("comet_ml", "comet_ml", install="comet-ml")
dagshub = _tracker("dagshub", "dagshub", "mlflow", install="dagshub mlflow")
dvclive = _tracker("dvclive", "dvclive")
flyte = _tracker("flyte", "flytekit", install="flytekit", by_name_only=True)
neptune = _tracker("neptune", "neptune")
swanlab = _tracker("swanlab", "swanlab")
trackio = _tracker("trackio", "trackio")
