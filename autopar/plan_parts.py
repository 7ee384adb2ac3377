"""The parts of a plan, strictly typed: a file that says anything else is refused (see `plans.py`)."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from autopar.workload import MOST_TOKENS


class Part(BaseModel):
    """Strict: a number is no text, an unknown field is an error, and nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[
    float, BeforeValidator(lambda value: float(value) if type(value) is int else value), Field(ge=0)
]
Fraction = Seconds
Bytes = Count
Recompute = Literal["none", "selective", "full"]
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _printable(text: str) -> str:
    """Texts are printed on terminals: control characters but tab and newline are spelled out."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


Text = Annotated[str, Field(max_length=100_000), AfterValidator(_printable)]
Tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class ModelPart(Part):
    """`fingerprint`: of the Program (see `fingerprint`); a plan runs only the model it was made for."""

    name: Text
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    parameters: Count
    task: Text


class DataPart(Part):
    """`batch`: sequences per step over the whole cluster, in `micro_batches` parts one after the other."""

    batch: Annotated[int, Field(gt=0, le=MOST_TOKENS)]
    seq: Annotated[int, Field(gt=0, le=MOST_TOKENS)]
    micro_batches: Positive


class BlockPart(Part):
    """One unique block: in-graph shardings. `ops`: node -> mesh axis -> the loop of the op that the axis splits."""

    times: Positive
    inputs: Annotated[tuple[Text, ...], Tuple]
    outputs: Annotated[tuple[Text, ...], Tuple]
    state: dict[str, Text]
    ops: dict[str, dict[str, Text]]


class PredictedPart(Part):
    """What the cost model says of one step; memory is of one rank. `bound_s`: no plan of the searched space is faster.
    `searched`: how much of the space was bounded, priced and simulated. `frontier`: (seconds, bytes) of the layouts
    that no other beats in both. `moments`: bytes of the fullest rank at each moment of a step."""

    step_time_s: Seconds
    tokens_per_s: Seconds
    mfu: Fraction
    time_s: dict[str, Seconds]
    memory_bytes: dict[str, Bytes]
    memory_total_bytes: Bytes
    memory_limit_bytes: Bytes
    bound_s: Seconds | None = None
    searched: dict[str, Count] = {}
    moments: dict[str, Bytes] = {}


class Alternative(Part):
    """A rejected combination and why. `mesh`: of a plan with a layout, the other layout."""

    mesh: Text
    micro_batches: Positive
    recompute: Recompute
    step_time_s: Seconds
    memory_total_bytes: Bytes
    fits: bool
    reason: Text


class Unruled(Part):
    """An op that has no rule and so runs whole on every rank; `seconds` per step on each."""

    op: Text
    block: Text
    times: Positive
    bytes: Bytes
    seconds: Seconds
