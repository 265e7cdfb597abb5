"""Make the modules beside the examples importable, as they are for each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
