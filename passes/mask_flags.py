"""Flags of masks: what the tensor of an attention mask says, where flags of attention can say all of it.

In:  a tensor that capture traces, and the flags it stands for.
Out: the same tensor with a note that whoever takes it unchanged can read; what is computed from it has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_NOTE = "_autopar_flags"


@dataclass(frozen=True)
class Flags:
    """`causal` and `window` of `autopar.functional.attention`."""

    causal: bool
    window: int | None = None


def note(mask: Tensor, flags: Flags | None) -> None:
    """Say that `mask` is what `flags` say, and nothing more."""
    if flags is not None:
        setattr(mask, _NOTE, flags)


def noted(mask: object) -> Flags | None:
    """The flags that say all that a mask says, if that is known."""
    flags = getattr(mask, _NOTE, None)
    return flags if isinstance(flags, Flags) else None
