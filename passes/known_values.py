"""Known values: what a model decides by the values of its inputs is decided as for the example, and checked of every batch.

In:  the example inputs, beside the traced tensors that stand for them.
Out: while a model is traced, `if mask.any()`, `lengths.tolist()` and `x[mask]` work where inputs and plain numbers alone
     decide them (parameters do not); and a `Decision` for each, which says whether it holds of another batch.

    real = (pixels == 0).sum((1, 2)) != 48       traced, and computed for the example: [True, True]
    x[real]                                      all of it: x; of every batch, `real` must have 2 that are true
    x[mask]                                      of 5 places: x[nonzero_static(mask, size=5)]; 5 places in every batch

Steps that lead to a decision are kept on a tape of torch functions (`passes/follow_values.py` writes it), which is played
again with a batch. It is used only where capture without it fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.nested import flat_inputs
from autopar.program import Condition
from autopar.torch_private import is_fake, outside_of_modes, plain_dispatch, pytree

NOTE = "_autopar_known"
_TORCH = str(Path(torch.__file__).parent)
_HERE = (str(Path(__file__).parent), str(Path(__file__).resolve().parent))


@dataclass
class Memory:
    """Of the tensors that share it. `changes`: the steps that changed it in place."""

    unchanged: bool = True
    given: bool = False  # an input's, which is the caller's
    changes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Known:
    """The value of a traced tensor for the example, and the step of the tape that makes it."""

    value: Tensor
    step: int
    leaf: int
    memory: Memory


@dataclass(frozen=True)
class Made:
    """An argument of a step: a result of an earlier one."""

    step: int
    leaf: int


@dataclass(frozen=True)
class Step:
    """`function` of arguments (leaves of a tree, `Made` for what other steps make); or an input."""

    function: Callable[..., Any] | None
    leaves: tuple[Any, ...]
    tree: Any
    input: str = ""


@dataclass(frozen=True)
class Decision(Condition):
    """What the steps compute of a batch is `expected`: a number of places that are true, or plain values."""

    inputs: tuple[str, ...]
    where: str
    steps: tuple[tuple[int, Step], ...]
    made: Made
    counted: bool
    expected: Any

    def violated(self, batch: Mapping[str, Tensor]) -> str | None:
        results: dict[int, list[Any]] = {}
        with torch.no_grad():
            for number, step in self.steps:
                if step.function is None:
                    results[number] = [batch[step.input].detach().cpu()]
                    continue
                leaves = [
                    results[leaf.step][leaf.leaf] if isinstance(leaf, Made) else leaf for leaf in step.leaves
                ]
                args, kwargs = pytree.tree_unflatten(leaves, step.tree)
                results[number] = pytree.tree_leaves(step.function(*args, **kwargs))
        found = decided(results[self.made.step][self.made.leaf], self.counted)
        if found == self.expected:
            return None
        names, planned = ", ".join(self.inputs), f"the plan is for {_short(self.expected)}"
        if self.counted:
            return f"{found} places are marked by a mask of {names}, {planned}"
        return f"a value that {names} decide is {_short(found)}, {planned}"

    @property
    def hint(self) -> str:
        return "batches that decide the same, or compile with a batch that has the other"


def decided(value: Tensor, counted: bool) -> Any:
    return int(value.count_nonzero()) if counted else value.tolist()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


UNDECIDED = object()


@dataclass
class Knowledge:
    """What is known while a model is traced, and what was decided by it."""

    example: Mapping[str, Any]
    steps: list[Step] = field(default_factory=list)
    decisions: dict[tuple[int, int, bool, int], Decision] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)
    memories: dict[int, list[Memory]] = field(default_factory=dict)  # of a step's results
    shared: set[int] = field(default_factory=set)  # steps that stand for several calls
    settled: set[int] = field(default_factory=set)  # masks of all or of nothing, of floating-point inputs

    def start(self, traced: Mapping[str, Any]) -> None:
        """Forward is given these tensors in the place of the example's."""
        for kept in (self.steps, self.decisions, self.numbers, self.memories, self.shared, self.settled):
            kept.clear()
        example = flat_inputs(self.example)
        for name, tensor in flat_inputs(traced).items():
            value = example.get(name)
            if (
                isinstance(tensor, Tensor)
                and isinstance(value, Tensor)
                and not (value.is_meta or is_fake(value))
            ):
                self.steps.append(Step(None, (), None, name))
                with outside_of_modes(), plain_dispatch():
                    known = Known(value.detach().cpu(), len(self.steps) - 1, 0, Memory(given=True))
                setattr(tensor, NOTE, known)

    def number(self, step: Step) -> int:
        """Of the step on the tape, or of an equal one: layers that compute the same then decide the same."""
        key: Any = (step.function, tuple((type(leaf), leaf) for leaf in step.leaves), str(step.tree))
        try:
            found = self.numbers.setdefault(key, len(self.steps))
        except TypeError:  # a slice, or what else has no hash
            found = len(self.steps)
        if found == len(self.steps):
            self.steps.append(step)
        else:
            self.shared.add(found)
        return found

    def change(self, step: Step, memory: Memory) -> None:
        """A step that changes tensors in place: what comes after it is another value."""
        memory.changes.append(len(self.steps))
        self.steps.append(step)
        self.numbers.clear()
        self.settled.clear()

    def decide(self, known: Known, *, counted: bool) -> Any:
        """The value (or the number of true places) for the example, from now on a condition on every batch; `UNDECIDED`
        where it must not be fixed.

        Data differs from batch to batch: of floating-point inputs only that a mask is of everything or of nothing is
        decided, and only by Transformers' code (which drops padding images); and what follows from such a mask.
        """
        key = (known.step, known.leaf, counted, len(known.memory.changes))
        with outside_of_modes(), plain_dispatch():
            found = decided(known.value, counted)
        if key in self.decisions:
            return found
        place, theirs = _model_line()
        steps = self._leading_to(known.step, self.settled)
        if any(step.input and self._is_float(step.input) for _, step in steps):
            if not (counted and theirs and found in (0, known.value.numel())):
                return UNDECIDED
            self.settled.add(known.step)
        steps = self._leading_to(known.step, frozenset())
        inputs = tuple(step.input for _, step in steps if step.input)
        if inputs:
            self.decisions[key] = Decision(inputs, place, steps, Made(known.step, known.leaf), counted, found)
        return found

    def _is_float(self, name: str) -> bool:
        value = flat_inputs(self.example)[name]
        return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())

    def _leading_to(self, last: int, settled: Set[int]) -> tuple[tuple[int, Step], ...]:
        needed, left = {last}, [last]
        while left:
            number = left.pop()
            if number in settled:
                continue
            fresh = {leaf.step for leaf in self.steps[number].leaves if isinstance(leaf, Made)}
            fresh.update(change for memory in self.memories.get(number, ()) for change in memory.changes)
            fresh -= needed
            needed |= fresh
            left += fresh
        return tuple((number, self.steps[number]) for number in sorted(needed))

    @property
    def notes(self) -> list[str]:
        decisions = list(self.decisions.values())
        if not decisions:
            return []
        names = sorted({name for one in decisions for name in one.inputs})
        return [
            f"what the values of {', '.join(names)} decide is as in the example ({len(decisions)} decisions, the first at "
            f"{decisions[0].where})"
        ]


def keep(made: Tensor, given: object) -> None:
    """`made` is what `given` is, in another place of the graph."""
    known = getattr(given, NOTE, None)
    if known is not None:
        setattr(made, NOTE, known)


def identity(leaf: object) -> tuple[int, int] | None:
    """Equal for tensors of the same known value."""
    known = known_of(leaf)
    return None if known is None else (known.step, known.leaf)


def known_of(leaf: object) -> Known | None:
    known = getattr(leaf, NOTE, None) if isinstance(leaf, Tensor) else None
    return known if isinstance(known, Known) and known.memory.unchanged else None


def _model_line() -> tuple[str, bool]:
    """file:line of the model's code that is being run, and whether it is Transformers'."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", _TORCH, *_HERE)):
            return f"{file}:{frame.f_lineno}", frame.f_globals.get("__name__", "").startswith("transformers.")
        frame = frame.f_back
    return "its forward", False
