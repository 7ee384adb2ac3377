"""The error tree. Every error a user can meet says where, what was found, what was expected and what to try."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of every error autopar raises on purpose.

    `what` is one sentence on what was found and what was expected; `where` names the place
    (file and line, node, field); `hint` says what to try. The text of the exception holds all three.
    `exit_code` is what the command line returns.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        lines = [what]
        if where:
            lines.append(f"  at {where}")
        if hint:
            lines.append(f"  try {hint}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.hint))


def _rebuild(kind: type[AutoparError], what: str, where: str | None, hint: str | None) -> AutoparError:
    return kind(what, where=where, hint=hint)


class UsageError(AutoparError):
    """A request that cannot be understood: a bad option, a malformed constraint, an unknown axis name."""

    exit_code = 2


class ClusterError(AutoparError):
    """A cluster name, file or device that cannot be used."""

    exit_code = 3


class ModelError(AutoparError):
    """A model that cannot be found, built or captured."""

    exit_code = 4


class CaptureError(ModelError):
    """torch.export could not turn the model into a graph."""


class ShardingError(AutoparError):
    """A sharding that is malformed, or that a tensor or an op cannot take."""

    exit_code = 5


class ConstraintError(ShardingError):
    """Two annotations or constraints that cannot hold together."""


class InfeasibleError(AutoparError):
    """No plan fits; says by how much, and what would fit."""

    exit_code = 6


class PlanError(AutoparError):
    """A plan file that is truncated, malformed, too new, or made for another model."""

    exit_code = 7


class TrainingError(AutoparError):
    """A run that cannot go on: a batch that does not divide, a NaN loss, a rank that died."""

    exit_code = 8


class NonFiniteError(TrainingError):
    """A loss or a gradient norm that is nan or infinite. No parameter has changed: the step can be skipped."""


class PeerError(TrainingError):
    """A collective that another rank did not take part in: it died, failed, or was stuck for too long."""


class HangError(TrainingError):
    """A rank that does not come to where the others wait for it, named; or one that waits for its data for too long."""
