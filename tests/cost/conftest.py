"""Hand-written problems live beside the tests of the passes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "passes"))
