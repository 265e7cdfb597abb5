import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from rank_programs import Nursery


@pytest.fixture(scope="session")
def nursery():
    """An interpreter of which ranks are forked."""
    with Nursery() as made:
        yield made
