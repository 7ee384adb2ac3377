"""Hand plan: the placement that a Transformers model's own tensor-parallel plan describes, to compare ours with.

In:  a Problem and its Program, a plan of the model (`plans_of`: module or parameter -> style), a mesh.
Out: a `HandPlacement`: the choice of every op and the sharding of every value, and notes on what could not be had.

    {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}, tp=8
      -> q_proj splits its outputs, the ops up to o_proj the heads, o_proj its inputs; all else is whole

A style says how a parameter is stored and what its module hands on (transformers/distributed/tensor_parallel.py):

| style | stored, split by | the module's result |
|---|---|---|
| colwise, packed_colwise | rows (out features; experts' `[e, out, in]` the dim before the last) | stays split |
| colwise_gather_output, colwise_rep | rows | gathered |
| rowwise, packed_rowwise | the last dim (in features); biases are whole | summed over the ranks |
| rowwise_split_input, rowwise_rep | the last dim; takes its slice of a whole input | summed |
| embedding_rowwise, embedding_colwise | vocabulary; features | summed; gathered |
| grouped_gemm (expert-parallel plans) | experts; each rank sends its slice of the tokens to them | gathered |
| others | whole | follows from the ops |

What is split stays so through the ops that can go on with it, and is gathered where one cannot. Values that modules
hand to each other and that are not split by a style are whole, as they are there. Two things are kinder to the plan
than what Transformers 5.24 runs: users of one value share one all-reduce of its gradient (there q, k and v each make
their own), and a split that cuts a head in two is gathered (there the view into heads fails).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.mesh import Mesh
from autopar.passes.candidates import TENSOR_AXIS, Candidate, candidates
from autopar.passes.pricing import arriving, makers
from autopar.problem import Choice, Op, Problem, Value
from autopar.program import Program
from autopar.rules.rule import JOINT, pair_choice
from autopar.sharding import Sharding

ROWS = frozenset({"colwise", "packed_colwise", "colwise_gather_output", "colwise_rep"})
COLUMNS = frozenset({"rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"})
# Of an expert-parallel plan: whole experts on each rank, tokens sent to them and back.
DISPATCHED = "grouped_gemm"
# What leaves the module whole again.
GATHERED = frozenset({"colwise_gather_output", "colwise_rep", "embedding_colwise", DISPATCHED})
EMBEDDINGS: Mapping[str, int] = {"embedding_rowwise": 0, "embedding_colwise": 1}
# Styles under which a parameter is whole: norms beside split heads, routers, whole modules that hold split parameters.
WHOLE = frozenset(
    {
        "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_tp_experts", "moe_identity_expert",
        "local_params", "replicate", "sequence_parallel", "ep_dispatch_experts",
    }
)  # fmt: skip
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class HandPlacement:
    """`choices` and `shardings` as in a Solution. `notes`: parts of the plan that the ops could not follow.
    `used`: how many parameters of the blocks the plan names."""

    choices: Mapping[str, Choice]
    shardings: Mapping[str, Sharding]
    notes: tuple[str, ...]
    used: int


def hand_placement(program: Program, problem: Problem, plan: Mapping[str, str], mesh: Mesh) -> HandPlacement:
    """The placement that `plan` describes on a mesh with the axis `tp`."""
    styles = _styles(program, problem, plan)
    walk = _Walk(problem, styles, mesh)
    while True:
        refused = walk.run()
        if not refused:
            return HandPlacement(walk.choices, walk.shardings, tuple(walk.notes), len(styles))
        walk.refuse(refused)


def plans_of(model: Any) -> dict[str, dict[str, str]]:
    """The plans by hand of a Transformers model: `tp`, and `tp+ep` where it has one for experts on the same ranks, whose
    entries stand in place of those for the modules it names and what is inside of them."""
    plans = {"tp": dict(model.tp_plan)}
    experts = dict(model.ep_plan)
    if experts:
        inside = tuple(f"{name}." for name in experts)
        kept = {
            name: style
            for name, style in model.tp_plan.items()
            if name not in experts and not name.startswith(inside)
        }
        plans["tp+ep"] = {**kept, **experts}
    return plans


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """The style of a parameter (or a piece of one, `qkv_proj.weight[0:512]`): its own entry, or its module's; layer
    numbers are `*` in the plan."""
    generic = _NUMBER.sub(".*", name.partition("[")[0])
    return plan.get(generic) or plan.get(generic.rpartition(".")[0])


def _styles(program: Program, problem: Problem, plan: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Value name -> (style, a state it stands for), for the parameters of blocks that the plan names. Of a table that is
    tied to the head, look-ups go by the embedding's style and the product by the head's."""
    tables = {op.operands[0] for op in problem.ops if op.kind == "aten.embedding"}
    aliases: dict[str, list[str]] = {}
    for alias, name in program.tied.items():
        aliases.setdefault(name, []).append(alias)
    found: dict[str, tuple[str, str]] = {}
    for call in program.calls:
        for node, state in zip(program.blocks[call.block].state, call.state, strict=True):
            value = f"{call.block}/{node}"
            if program.state[state].kind != "parameter" or value in found:
                continue
            named = [
                (style, name)
                for name in (state, *aliases.get(state, ()))
                if (style := style_of(name, plan)) is not None
            ]
            named.sort(key=lambda item: (item[0] in EMBEDDINGS) != (value in tables))
            if named:
                found[value] = named[0]
    return found


class _Walk:
    """Goes through the ops in order; `forms`: the dim over which tp splits each value as users see it."""

    def __init__(self, problem: Problem, styles: Mapping[str, tuple[str, str]], mesh: Mesh) -> None:
        self.problem, self.styles, self.mesh = problem, styles, mesh
        self.size = mesh.sizes[TENSOR_AXIS]
        self.whole: set[str] = set()
        self.notes: list[str] = []
        self.groups = arriving(problem)
        self.made = makers(problem)
        self.able = {op.name: candidates(op, problem, mesh) for op in problem.ops}
        self.named = dict(styles)  # and what is made of such parameters alone
        self.choices: dict[str, Choice] = {}
        self.shardings: dict[str, Sharding] = {}

    def refuse(self, names: set[str]) -> None:
        """Keep the groups of these values whole from now on."""
        for name in names:
            style, state = self.styles[name]
            self.notes.append(f"{state} is kept whole: no op can use it as {style} splits it")
        self.whole |= {self._group(name) for name in names}

    def _group(self, name: str) -> str:
        return self.problem.values[name].interface or name

    def run(self) -> set[str]:
        """Fill in choices and shardings; gives state that is split but wanted otherwise (gathering state is no way)."""
        self.choices, self.shardings = {}, {}
        stored = self._stored()
        for members in self.groups.values():
            sharding = next((stored[v.name] for v in members if v.name in stored), None)
            for value in members:
                self.shardings[value.name] = sharding or Sharding.whole(len(value.info.shape))
        forms = {name: sharding.dim_of(TENSOR_AXIS) for name, sharding in self.shardings.items()}
        refused: set[str] = set()
        self.named = dict(self.styles)
        for op in self.problem.ops:
            chosen = self._choose(op, forms)
            self.choices[op.name] = chosen.as_choice
            for name, use in zip(op.operands, chosen.uses, strict=True):
                if name in stored and use.sharding.dim_of(TENSOR_AXIS) != forms[name]:
                    refused.add(name)
            named = list(self._named(op))
            derived = bool(named) and all(name in self.named for name in op.operands)
            gathered = not derived and any(self.named[name][0] in GATHERED for name in named)
            for name, made in zip(op.results, chosen.results, strict=True):
                if name in self.problem.values:
                    self.shardings[name] = made
                    if derived:  # a cast, a slice or a view of a parameter
                        self.named[name] = self.named[named[0]]
                    forms[name] = None if gathered or made.sums else made.dim_of(TENSOR_AXIS)
        return refused

    def _stored(self) -> dict[str, Sharding]:
        """The sharding of the state that is split."""
        found: dict[str, Sharding] = {}
        for name, (style, state) in self.styles.items():
            value = self.problem.values[name]
            dim = split_dim(style, state, len(value.info.shape))
            if dim is None or self._group(name) in self.whole:
                continue
            if value.info.shape[dim] % self.size:
                note = (
                    f"{state}: {value.info.shape[dim]} rows of dim {dim} do not divide by {self.size}: whole"
                )
                if note not in self.notes:
                    self.notes.append(note)
                continue
            found[name] = Sharding.whole(len(value.info.shape)).with_dim(dim, (TENSOR_AXIS,))
        return found

    def _named(self, op: Op) -> Iterator[str]:
        return (name for name in op.operands if name in self.named)

    def _choose(self, op: Op, forms: Mapping[str, int | None]) -> Candidate:
        """The candidate that goes on with how the operands are split; the whole one if none does."""
        able = {dict(candidate.choice).get(TENSOR_AXIS): candidate for candidate in self.able[op.name]}
        for factor in self._wanted(op, forms):
            if factor in able:
                return able[factor]
        return able.get(None) or next(iter(able.values()))

    def _wanted(self, op: Op, forms: Mapping[str, int | None]) -> Iterator[str]:
        """Factors over which operands are split, those of state first (it cannot be gathered), then by size."""
        rule = op.rule
        if rule is None:
            return

        if any(self.named[name][0] == DISPATCHED and forms[name] is not None for name in self._named(op)):
            yield from (pair_choice(pair) for pair in reversed(rule.pairs))

        def weight(index: int) -> tuple[bool, int]:
            value: Value = self.problem.values[op.operands[index]]
            return (not value.state, -value.info.bytes)

        for index in sorted(range(len(op.operands)), key=weight):
            dim = forms[op.operands[index]]
            factors = () if dim is None else rule.operands[index][dim]
            if factors:
                yield factors[0]
                yield JOINT.join(factors)  # heads split finer than the keys' are


def split_dim(style: str, name: str, dims: int) -> int | None:
    """The dim of a parameter that a style splits; None where it is whole."""
    if style in EMBEDDINGS:
        return EMBEDDINGS[style]
    if style == DISPATCHED:
        return 0
    if style in ROWS:
        return max(dims - 2, 0)
    if style in COLUMNS:
        return (
            None
            if name.partition("[")[0].endswith("bias") or (style == "packed_rowwise" and dims == 1)
            else dims - 1
        )
    return None
