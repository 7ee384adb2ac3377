"""Small PyTorch programs as a user would write them; `build(name)` makes one with its batch."""

from tests.programs import losses, nets, sequences, writing
from tests.programs.registry import PROGRAMS, build

__all__ = ["PROGRAMS", "build", "losses", "nets", "sequences", "writing"]
