"""The notebook of the examples runs from top to bottom, twice, and its results are good."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

LIMIT_S = 300
NOTEBOOK = Path(__file__).resolve().parents[2] / "packages/tr-all/examples/notebook/first_training.ipynb"


def cells(path):
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def executed(folder, name):
    """Execute the copy of the notebook in a folder; return what its cells print."""
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", NOTEBOOK.name, "--output", name]
    known = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "IPYTHONDIR": str(folder / "ipython")}
    ran = subprocess.run(command, cwd=folder, env=known, timeout=LIMIT_S, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    outputs = [output for cell in cells(folder / f"{name}.ipynb") for output in cell["outputs"]]
    return "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")


def test_the_notebook_is_kept_without_outputs():
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in cells(NOTEBOOK))


@pytest.mark.skipif(
    not all(find_spec(name) for name in ("nbconvert", "ipykernel", "matplotlib", "mlxtend")),
    reason="nox -s report installs nbconvert, ipykernel, matplotlib and mlxtend",
)
def test_the_notebook_runs_from_top_to_bottom_and_again(tmp_path):
    shutil.copy2(NOTEBOOK, tmp_path)
    printed = executed(tmp_path, "done")
    assert "4000 to train on, 500 to validate, 500 to test" in printed
    assert "250 steps, mean loss" in printed
    assert "now at step 375" in printed
    assert float(re.search(r"accuracy on the test images: ([\d.]+)", printed)[1]) >= 0.95
    assert float(re.search(r"with Adafactor: ([\d.]+)", printed)[1]) >= 0.85
    assert (tmp_path / "outputs/notebook/report.html").is_file()
    assert "now at step 375" in executed(tmp_path, "again")
