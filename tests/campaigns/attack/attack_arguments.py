"""Attack what reads arguments, configurations of launchers and files of earlier runs: changed bytes in every parser."""

from __future__ import annotations

import os
from collections.abc import Iterator

import fuzz_batches
from fuzz_arguments import parsers
from runner import Case, Options

FUZZED = 100_000  # files a parser
QUICK = 500


def cases(options: Options) -> Iterator[Case]:
    """Yield files for each parser."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # a launcher's, which arguments would be checked against
        os.environ.pop(variable, None)
    with fuzz_batches.silence():
        for parser in parsers():
            yield from fuzz_batches.cases(parser, QUICK if options.quick else FUZZED, options.seed, options.folder)
