"""Optimizers of bitsandbytes, torchao, schedulefree and others: libraries in an environment of their own."""

import sys
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of its own sources, when they are compiled for the first time
    import torchao.optim  # noqa: F401
