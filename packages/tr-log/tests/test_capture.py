import io
import logging
import warnings

import pytest

from tr_log import capture_warnings, configure


def test_captured_warnings_carry_the_rank():
    stream = io.StringIO()
    configure("info", rank=1, world_size=2, stream=stream)
    capture_warnings(True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("[rank 1/2] ")
    assert "DeprecationWarning: old name" in lines[0]
    assert all(line.startswith("[rank 1/2] ") for line in lines)


def test_warnings_are_pythons_own_again_afterwards():
    capture_warnings(True)
    capture_warnings(False)
    assert logging.getLogger("py.warnings").handlers == []
    with pytest.warns(UserWarning, match="plain"):
        warnings.warn("plain", stacklevel=1)
