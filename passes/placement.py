"""Placement: which loop of every op each mesh axis splits, found exactly, for all unique blocks at once.

In:  a Problem, a Mesh with axes among dp, fsdp and tp, Prices.
Out: a Solution of least cost: choices, shardings, seconds per micro-batch.

    tp=4:  q, k, v and gate, up split their outputs, o and down their inputs, the norms the sequence

Every op is a variable (its candidates), and so is the sharding of what arrives in a block: state, and values handed
from block to block. A value moves once for each distinct use; where several users may share a move, a further
variable says which moves are made. `elimination.minimise` then gives the minimum, and `evaluate` prices the answer
again from scratch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.candidates import DATA_AXES, Candidate, candidates
from autopar.passes.elimination import Factor, Table, TooWideError, improve, minimise
from autopar.passes.pricing import (
    Pricer,
    arriving,
    block_of,
    by_kind,
    evaluate,
    group_of,
    makers,
    normal_use,
    total_s,
)
from autopar.passes.propagate import with_replicated_keys
from autopar.problem import Op, Problem, Solution, Value
from autopar.sharding import Sharding, Use

# Ties are decided for fewer splits and moves: far below any real cost, far above rounding.
_TIE_S = 1e-11
# With more sets of shared moves of one value than this, users share only within small parties (an upper bound).
_MAX_SETS = 2048


Least = Callable[[Sequence[int], Sequence[Factor]], tuple[list[int], float]]


@dataclass(frozen=True)
class _User:
    """One variable that uses a value, with the uses each of its choices asks for; `variable` -1: always the same."""

    variable: int
    wishes: tuple[frozenset[Use], ...]


def solve(problem: Problem, mesh: Mesh, prices: Prices) -> Solution:
    """The placement of least time per micro-batch.

    Exact, but for models whose values have so many users that the tables outgrow memory: there moves are shared only
    among up to three users at a time while searching, or none; and where even that is too much, the best that
    `elimination.improve` finds. Raises ConstraintError where what is fixed cannot be had.
    """
    problem = with_replicated_keys(problem, mesh)
    pricer = Pricer(problem, mesh, prices)
    found = _candidates(problem, mesh)
    for party in (len(problem.ops) + 1, 3, 1):
        try:
            return _Search(problem, mesh, prices, pricer, found, party).solution(minimise)
        except TooWideError:
            continue
    return _Search(problem, mesh, prices, pricer, found, 1).solution(improve)


def _candidates(problem: Problem, mesh: Mesh) -> dict[str, list[Candidate]]:
    """Candidates per op, without those that want partial sums of a value that never is one."""
    sums: set[str] = set()
    found = {}
    for op in problem.ops:
        able = [
            candidate
            for candidate in candidates(op, problem, mesh)
            if all(
                name in sums or not use.sharding.sums
                for name, use in zip(op.operands, candidate.uses, strict=True)
            )
        ]
        sums.update(
            name
            for index, name in enumerate(op.results)
            if any(candidate.results[index].sums for candidate in able)
        )
        found[op.name] = able
    return found


class _Search:
    """The factor graph of one Problem on one mesh: variables with their domains, and cost tables over them."""

    def __init__(
        self,
        problem: Problem,
        mesh: Mesh,
        prices: Prices,
        pricer: Pricer,
        found: dict[str, list[Candidate]],
        party: int,
    ) -> None:
        self.problem, self.mesh, self.prices, self.pricer, self.found, self.party = (
            problem,
            mesh,
            prices,
            pricer,
            found,
            party,
        )
        self.sizes: list[int] = []
        self.factors: list[Factor] = []
        self.made_by = makers(problem)
        self.groups = arriving(problem)
        self.users: dict[str, list[_User]] = defaultdict(list)
        self.move_tables: dict[tuple[object, ...], Table] = {}
        self.op_variable = {op.name: self._op(op) for op in problem.ops}
        self.arrivals: dict[str, list[Sharding]] = {}
        self.group_variable: dict[str, int] = {}
        self._find_users()
        for group, members in self.groups.items():
            self._group(group, members)
        for value in problem.values.values():
            self._moves(value)

    def solution(self, least: Least = minimise) -> Solution:
        chosen, _ = least(self.sizes, self.factors)
        choices = {
            name: self.found[name][chosen[variable]].as_choice for name, variable in self.op_variable.items()
        }
        shardings = {}
        for name, value in self.problem.values.items():
            variable, made = self._made(value)
            shardings[name] = made[chosen[variable]]
        costs = evaluate(self.problem, self.mesh, self.prices, choices, shardings, self.pricer)
        return Solution(choices, shardings, by_kind(costs), total_s(costs))

    # ---- variables ----------------------------------------------------------------------------------------

    def _variable(self, unary: Sequence[float]) -> int:
        self.sizes.append(len(unary))
        self.factors.append(Factor((len(self.sizes) - 1,), np.array(unary, dtype=np.float64)))
        return len(self.sizes) - 1

    def _op(self, op: Op) -> int:
        costs = []
        for candidate in self.found[op.name]:
            forward, backward = self.pricer.op_s(op, candidate)
            splits = sum(factor is not None for _, factor in candidate.choice)
            costs.append(op.times * (forward + backward) + _TIE_S * splits)
        return self._variable(costs)

    def _find_users(self) -> None:
        """The uses of every value by the ops of its block."""
        for op in self.problem.ops:
            for name in dict.fromkeys(op.operands):
                value = self.problem.values[name]
                at = [index for index, operand in enumerate(op.operands) if operand == name]
                wishes = tuple(
                    frozenset(normal_use(value, candidate.uses[index]) for index in at)
                    for candidate in self.found[op.name]
                )
                self.users[name].append(_User(self.op_variable[op.name], wishes))

    def _group(self, group: str, members: list[Value]) -> None:
        """One variable for what arrives under one sharding: whole, or as some user or maker has it."""
        rank = len(members[0].info.shape)
        wanted = {Sharding.whole(rank): None}
        for member in members:
            for user in self.users[member.name]:
                wanted.update((use.sharding, None) for wish in user.wishes for use in wish)
        for name, op in self.made_by.items():
            if group_of(self.problem.values[name]) == group:
                index = op.results.index(name)
                wanted.update((candidate.results[index], None) for candidate in self.found[op.name])
        if members[0].state:
            wanted = {sharding.without(DATA_AXES): None for sharding in wanted}
        domain = [sharding for sharding in wanted if not sharding.sums]
        domain.sort(key=lambda sharding: len(sharding.axes))
        self.arrivals[group] = domain
        costs = [self.pricer.state_s(members[0], sharding) for sharding in domain]
        if members[0].source:  # any rank can read its own piece, so the smallest that serves all users
            ties = [1 / self.pricer.ways(sharding) for sharding in domain]
        else:
            ties = [float(len(sharding.axes)) for sharding in domain]
        self.group_variable[group] = self._variable(
            [cost + _TIE_S * tie for cost, tie in zip(costs, ties, strict=True)]
        )

    def _made(self, value: Value) -> tuple[int, list[Sharding]]:
        """The variable that decides how a value is made (or arrives), and the sharding for each of its choices."""
        op = self.made_by.get(value.name)
        if op is None:
            group = group_of(value)
            return self.group_variable[group], self.arrivals[group]
        index = op.results.index(value.name)
        return self.op_variable[op.name], [candidate.results[index] for candidate in self.found[op.name]]

    # ---- moves --------------------------------------------------------------------------------------------

    def _moves(self, value: Value) -> None:
        """The tables that price the reshards of one value."""
        users = list(self.users[value.name])
        if value.name in self.made_by:
            if value.interface in self.group_variable:
                wishes = tuple(frozenset([Use(sharding)]) for sharding in self.arrivals[value.interface])
                users.append(_User(self.group_variable[value.interface], wishes))
            if value.name in self.problem.outputs:
                users.append(_User(-1, (frozenset([Use(Sharding.whole(len(value.info.shape)))]),)))
        maker, made = self._made(value)
        for start in range(0, len(users), self.party):
            self._party(value, maker, made, users[start : start + self.party])

    def _party(self, value: Value, maker: int, made: list[Sharding], users: list[_User]) -> None:
        """Users of one value who share their moves: each distinct use is paid once.

        Uses that one user alone can have are priced between maker and user. For the others a variable holds the set
        of uses that are made; a user may have only what is in it, and it costs the sum of its members.
        """
        distinct = list(dict.fromkeys(made))
        row = {sharding: index for index, sharding in enumerate(distinct)}
        rows = np.array([row[sharding] for sharding in made])
        uses = list(
            dict.fromkeys(use for user in users for wish in user.wishes for use in sorted(wish, key=str))
        )
        column = {use: index for index, use in enumerate(uses)}
        prices = self._move_table(value, tuple(distinct), tuple(uses))
        costly = {use for use in uses if prices[:, column[use]].any()}
        seen = [frozenset(use for wish in user.wishes for use in wish) & costly for user in users]
        shared = {use for use in costly if sum(use in mine for mine in seen) > 1}
        for user in users:
            alone = [
                [column[use] for use in wish if use in costly and use not in shared] for wish in user.wishes
            ]
            if any(alone):
                table = np.stack([prices[:, columns].sum(axis=1) for columns in alone], axis=1)[rows]
                self._add((maker, user.variable), table)
        if not shared:
            return
        sets = self._sets(users, shared)
        if len(sets) > _MAX_SETS:
            raise TooWideError(f"{value.name} has {len(sets)} sets of shared moves")
        cost = np.stack(
            [prices[:, [column[use] for use in members]].sum(axis=1) for members in sets], axis=1
        )[rows]
        chooser = self._variable([0.0] * len(sets))
        self._add((maker, chooser), cost)
        for user in users:
            needs = [wish & shared for wish in user.wishes]
            table = np.array([[0.0 if need <= members else np.inf for members in sets] for need in needs])
            if table.any():
                self._add((user.variable, chooser), table)

    def _sets(self, users: Iterable[_User], shared: set[Use]) -> list[frozenset[Use]]:
        """Every set of shared uses that the users can come to together, smallest first."""
        sets: dict[frozenset[Use], None] = {frozenset(): None}
        for user in users:
            options = dict.fromkeys(frozenset(wish & shared) for wish in user.wishes)
            sets = dict.fromkeys(have | option for have in sets for option in options)
            if len(sets) > 4 * _MAX_SETS:
                break
        return sorted(sets, key=len)

    def _move_table(self, value: Value, made: tuple[Sharding, ...], uses: tuple[Use, ...]) -> Table:
        """Seconds of every reshard of all calls, [how it is made, how it is used]."""
        times = self.pricer.times[block_of(value.name)]
        key = (self.pricer.bytes[value.name], value.gradient, times, made, uses)
        table = self.move_tables.get(key)
        if table is None:
            entries = [
                [times * sum(self.pricer.move_s(value, source, use)) for use in uses] for source in made
            ]
            table = self.move_tables[key] = np.array(entries)
            table[table > 0] += _TIE_S
        return table

    def _add(self, variables: tuple[int, int], table: Table) -> None:
        """A table over two variables; a constant user (-1) or one variable in both places leaves one."""
        one, other = variables
        if one == other:
            self.factors.append(Factor((one,), np.diagonal(table).copy()))
        elif one == -1:
            self.factors.append(Factor((other,), table[0]))
        elif other == -1:
            self.factors.append(Factor((one,), table[:, 0]))
        else:
            self.factors.append(Factor((one, other), table))
