"""Keep tests apart from the launcher that may run them and from each other's notices."""

import pytest

from tr_args import aliases

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher's variables, and no former name noticed yet."""
    for variable in LAUNCHER:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(aliases, "_noticed", set())
