"""A captured program on simulated ranks, under the planner's placement or a random legal one, against the module.

A random placement gives every op any of its candidates and every arriving value any sharding: whatever rules and
lowerings allow must give the same loss and gradients, also where no planner would choose it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.candidates import TOKEN_AXES, Candidate, candidates
from autopar.passes.capture import capture
from autopar.passes.lower import RankProgram, lower
from autopar.passes.placement import solve
from autopar.passes.pricing import arriving, group_of
from autopar.passes.problem import build_problem
from autopar.problem import Problem, Solution
from autopar.program import Program
from autopar.runtime.groups import join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.simulate import simulate
from autopar.runtime.store import Entry, ParameterStore
from autopar.runtime.trainer import Trainer
from autopar.sharding import Sharding
from tests.programs import build


@dataclass(frozen=True)
class Outcome:
    """The loss, every gradient by parameter name, every buffer after the step."""

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@cache
def captured(name: str) -> tuple[Program, Problem]:
    model, inputs = build(name)
    program, axes = name_axes(capture(model, inputs, name=name))
    return program, build_problem(program, axes)


@cache
def expected(name: str) -> Outcome:
    """What the module itself gives."""
    model, inputs = build(name)
    result = model(**inputs)
    loss = result if isinstance(result, Tensor) else result["loss"] if isinstance(result, dict) else result[0]
    loss.backward()
    gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    return Outcome(float(loss.detach()), gradients, dict(model.named_buffers()))


def planned(problem: Problem, mesh: Mesh) -> Solution:
    cluster = load_cluster(f"cpu:{mesh.device_count}")
    return solve(problem, mesh, Prices.of(cluster, mesh, "fp32", problem))


def random_placement(problem: Problem, mesh: Mesh, seed: int) -> Solution:
    """Any candidate for every op, but sums only of values that are sums then; any sharding for what arrives."""
    chance = random.Random(seed)
    chosen: dict[str, Candidate] = {}
    summed: dict[str, tuple[str, ...]] = {}
    for op in problem.ops:
        able = [
            candidate
            for candidate in candidates(op, problem, mesh)
            if all(
                set(use.sharding.sums) <= set(summed.get(name, ()))
                for name, use in zip(op.operands, candidate.uses, strict=True)
            )
        ]
        split = [
            candidate
            for candidate in able
            if candidate.by_factor or any(u.sharding.sums for u in candidate.uses)
        ]
        chosen[op.name] = chance.choice(split if split and chance.random() < 0.8 else able)
        for name, made in zip(op.results, chosen[op.name].results, strict=True):
            summed[name] = made.sums
    shardings: dict[str, Sharding] = {}
    for op in problem.ops:
        shardings.update(zip(op.results, chosen[op.name].results, strict=True))
    wishes: dict[str, list[Sharding]] = {}
    for op in problem.ops:
        for name, use in zip(op.operands, chosen[op.name].uses, strict=True):
            wishes.setdefault(name, []).append(use.sharding)
    for members in arriving(problem).values():
        rank = len(members[0].info.shape)
        options = [
            Sharding.whole(rank),
            *(w for member in members for w in wishes.get(member.name, ()) if not w.sums),
        ]
        taken = chance.choice(options)
        if members[0].state:
            taken = taken.without(TOKEN_AXES)
        for member in members:
            if member.name not in shardings:
                shardings[member.name] = taken
    assert all(
        name in shardings for name, value in problem.values.items() if group_of(value) or name in wishes
    )
    return Solution({name: candidate.as_choice for name, candidate in chosen.items()}, shardings, {}, 0.0)


def run(name: str, mesh: Mesh, rank_program: RankProgram) -> Outcome:
    """One step's gradients on simulated ranks, as rank 0 sees them."""
    model, inputs = build(name)
    state = {**rank_program.constants, **dict(model.named_buffers(remove_duplicate=False))}
    state.update(model.named_parameters(remove_duplicate=False))

    def rank(_: int) -> Outcome:
        groups = join_mesh(mesh)
        store = ParameterStore(rank_program, groups, {key: value.detach() for key, value in state.items()})
        trainer = Trainer(RankModel(rank_program, groups, store), torch.optim.SGD(store.parameters.values()))
        loss = trainer.gradients(inputs)

        def local(entry: Entry) -> Tensor:
            found = entry.parameter.grad
            return torch.zeros_like(entry.parameter) if found is None else found

        gradients = {key: store.whole_parameter(key, local) for key in store.parts}
        return Outcome(loss, gradients, {key: store.whole_buffer(key) for key in store.buffers})

    return simulate(mesh.device_count, rank)[0]


def compare(name: str, mesh_text: str, placement: str, tolerance: float = 1e-9) -> None:
    """Raises AssertionError where the ranks differ from the module."""
    mesh = Mesh.parse(mesh_text)
    program, problem = captured(name)
    solution = (
        planned(problem, mesh) if placement == "planned" else random_placement(problem, mesh, int(placement))
    )
    found, wanted = run(name, mesh, lower(program, problem, solution, mesh)), expected(name)
    assert abs(found.loss - wanted.loss) <= tolerance * abs(wanted.loss), (found.loss, wanted.loss)
    largest = max(float(gradient.norm()) for gradient in wanted.gradients.values())
    for key, gradient in wanted.gradients.items():
        error = float((found.gradients[key] - gradient).norm())
        assert error <= tolerance * max(float(gradient.norm()), 1e-3 * largest), (
            key,
            error,
            float(gradient.norm()),
        )
    for key, buffer in found.buffers.items():
        if key in wanted.buffers and buffer.dtype != torch.bool:
            torch.testing.assert_close(buffer, wanted.buffers[key], rtol=tolerance, atol=tolerance)
