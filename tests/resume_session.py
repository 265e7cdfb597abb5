"""Stop and go on with a run at every step, in every combination of settings, and count the ends that differ.

`nox -s resume` runs it. The tests take a part of this: settings that have every pair of values, and fewer steps.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from resume_runs import all_settings, optimizer_settings, steps_that_end_otherwise


def main(argv=None):
    """Print a line for each setting and the counts; return 1 if any end differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="go on from each so many-th step only (%(default)s)")
    every = parser.parse_args(argv).every
    torch.set_num_threads(1)
    settings = [*all_settings(), *optimizer_settings()]
    resumed = mismatches = 0
    for number, setting in enumerate(settings, start=1):
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            different, count = steps_that_end_otherwise(setting, Path(folder) / "run", every)
        resumed, mismatches = resumed + count, mismatches + len(different)
        verdict = f"DIFFERENT from steps {different}" if different else "equal"
        seconds = time.monotonic() - began_s
        print(f"{number:3} of {len(settings)}  {count} resumes, {seconds:5.1f} s  {verdict}  {setting}", flush=True)
    print(f"settings {len(settings)}, resumes {resumed}, mismatches {mismatches}")
    return int(mismatches > 0)


if __name__ == "__main__":
    sys.exit(main())
