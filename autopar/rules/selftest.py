"""The numeric self-test of a rule: cut the operands as the rule says, run the op on every piece, put the pieces
together and compare with the op on the whole; forward, and backward for every operand's gradient.

    check_rule(torch.ops.mylib.op, (x, weight), "mylib::op")

Devices are simulated in one process: a mesh of one axis of size 2 and 3, and one of 2 x 2. Factors whose split
needs a lowering of its own (`special`) are listed as skipped: the plain op on pieces is not what runs there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from autopar.errors import ShardingError
from autopar.mesh import Mesh
from autopar.program import ITEM_BYTES, tensor_info
from autopar.rules.call import OpCall, leaves, map_leaves
from autopar.rules.registry import localize, op_key, rule_for
from autopar.rules.rule import SUMS, Rule, Sharded, sums_choice
from autopar.sharding import Sharding

if TYPE_CHECKING:
    from torch import Tensor

MESHES = (Mesh((("x", 2),)), Mesh((("x", 3),)), Mesh((("x", 2), ("y", 2))))

Choice = Mapping[str, "str | None"]
Coordinate = tuple[int, ...]  # a device's place along each mesh axis


@dataclass(frozen=True)
class RuleReport:
    """What `check_rule` did: the rule, the choices that agreed with the whole op, and those left out."""

    name: str
    rule: Rule
    checked: tuple[str, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.rule}: {len(self.checked)} choices agree, {len(self.skipped)} skipped"


def check_rule(
    op: Callable[..., Any],
    args: Sequence[Any],
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    *,
    gradients: bool = True,
    values: bool = True,
    tolerance: float | None = None,
    meshes: Sequence[Mesh] = MESHES,
) -> RuleReport:
    """Check the rule registered for `name` on one instance of the op, given with its real arguments.

    Give small float64 tensors whose dims are divisible by 2, 3 and 4 (12, or 4 and 6) so that many choices are
    legal. `gradients=False` leaves the backward out, `values=False` compares shapes only (empty). `tolerance` is
    relative and absolute: 1e-6, or 1e-4 if an operand has less than double precision. Raises
    ShardingError for the first choice that does not give the whole op's result, naming it; also if there is no
    rule for this instance.
    """
    kwargs = dict(kwargs or {})
    key = op_key(name)
    call = example_call(op, args, key, kwargs)
    rule = rule_for(call)
    if rule is None:
        raise ShardingError(
            f"no rule covers {key}({', '.join(map(str, call.operands))})",
            hint=f"register_rule({name!r}, ...)",
        )
    if tolerance is None:
        tolerance = (
            1e-4
            if any(info.is_float and ITEM_BYTES[info.dtype] < 8 for info in (*call.operands, *call.results))
            else 1e-6
        )
    checked, skipped = [], []
    for mesh in meshes:
        for choice in legal_choices(rule, mesh):
            shown = f"{mesh}: " + ", ".join(f"{axis}->{factor}" for axis, factor in choice.items() if factor)
            if any(factor in rule.special for factor in choice.values()):
                skipped.append(f"{shown} (special)")
                continue
            experiment = _Experiment(
                op, tuple(args), kwargs, rule, mesh, choice, f"{key} with rule '{rule}', {shown}"
            )
            experiment.run(gradients=gradients, values=values, tolerance=tolerance)
            checked.append(shown)
    return RuleReport(key, rule, tuple(checked), tuple(skipped))


def example_call(op: Callable[..., Any], args: Sequence[Any], name: str, kwargs: Mapping[str, Any]) -> OpCall:
    """The OpCall of a real call; runs the op to see its results."""
    import torch

    with torch.no_grad():
        results = [info for info in map(tensor_info, _tensors(op(*args, **kwargs))) if info is not None]

    def seen(leaf: Any) -> Any:
        return tensor_info(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return OpCall.of(op_key(name), map_leaves(tuple(args), seen), map_leaves(dict(kwargs), seen), results)


def legal_choices(rule: Rule, mesh: Mesh) -> Iterator[dict[str, str | None]]:
    """Every choice that splits or sums along at least one axis and whose factors divide."""
    options = (None, *rule.splittable(), *(sums_choice(group) for group in range(len(rule.sums))))
    for picked in itertools.product(options, repeat=len(mesh.names)):
        choice = dict(zip(mesh.names, picked, strict=True))
        ways: dict[str, int] = {}
        for axis, factor in choice.items():
            if factor is not None and not factor.startswith(SUMS):
                ways[factor] = ways.get(factor, 1) * mesh.size(axis)
        if any(picked) and all(rule.sizes[factor] % count == 0 for factor, count in ways.items()):
            yield choice


# ---- tensors on a simulated mesh ----------------------------------------------------------------------------


def coordinates(mesh: Mesh) -> list[Coordinate]:
    return list(itertools.product(*(range(size) for _, size in mesh.axes)))


def piece_slices(shape: Sequence[int], sharding: Sharding, mesh: Mesh, at: Coordinate) -> tuple[slice, ...]:
    """Where the device's piece lies in the whole tensor."""
    place = dict(zip(mesh.names, at, strict=True))
    slices = []
    for size, axes in zip(sharding.local_shape(shape, mesh), sharding.dims, strict=True):
        number = 0
        for axis in axes:
            number = number * mesh.size(axis) + place[axis]
        slices.append(slice(number * size, (number + 1) * size))
    return tuple(slices)


def cut(tensor: Tensor, sharding: Sharding, mesh: Mesh, *, seed: int = 0) -> dict[Coordinate, Tensor]:
    """What each device holds; partial sums are random addends of the whole."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    sums = [mesh.names.index(axis) for axis in sharding.sums]
    held = sorted({tuple(at[index] for index in sums) for at in coordinates(mesh)})
    addends = {}
    rest = tensor
    for key in held[:-1]:
        addends[key] = torch.randn(tensor.shape, dtype=torch.float64, generator=generator).to(tensor.dtype)
        rest = rest - addends[key]
    addends[held[-1]] = rest
    return {
        at: addends[tuple(at[index] for index in sums)][piece_slices(tensor.shape, sharding, mesh, at)]
        for at in coordinates(mesh)
    }


def assemble(
    pieces: Mapping[Coordinate, Tensor], shape: Sequence[int], sharding: Sharding, mesh: Mesh
) -> list[Tensor]:
    """The whole tensor as each group of devices that together hold it once would put it together."""
    import torch

    apart = [index for index, axis in enumerate(mesh.names) if axis not in sharding.axes]
    groups: dict[Coordinate, Tensor] = {}
    for at, piece in pieces.items():
        key = tuple(at[index] for index in apart)
        if key not in groups:
            groups[key] = torch.zeros(tuple(shape), dtype=piece.dtype)
        place = piece_slices(shape, sharding, mesh, at)
        if sharding.sums:
            groups[key][place] += piece
        else:
            groups[key][place] = piece
    return list(groups.values())


# ---- one choice -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Experiment:
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rule: Rule
    mesh: Mesh
    choice: Choice
    title: str

    def run(self, *, gradients: bool, values: bool, tolerance: float) -> None:
        import torch

        mesh, sharded = self.mesh, self.rule.shard(self.choice, self.mesh.sizes)
        operands = [leaf for leaf in leaves([list(self.args), self.kwargs]) if isinstance(leaf, torch.Tensor)]
        whole_in = [_leaf(tensor, gradients) for tensor in operands]
        whole_out = self._call(whole_in, None, sharded)
        pieces_in = [
            cut(x, use.sharding, mesh, seed=index)
            for index, (x, use) in enumerate(zip(operands, sharded.uses, strict=True))
        ]
        local_in = {at: [_leaf(pieces[at], gradients) for pieces in pieces_in] for at in coordinates(mesh)}
        local_out = {at: self._call(inputs, whole_out, sharded) for at, inputs in local_in.items()}

        for index, (whole, sharding) in enumerate(zip(whole_out, sharded.results, strict=True)):
            local = {at: outputs[index] for at, outputs in local_out.items()}
            wanted = sharding.local_shape(whole.shape, mesh)
            for piece in local.values():
                if tuple(piece.shape) != wanted:
                    self._fail(
                        f"result {index} of a piece has shape {list(piece.shape)}, the rule says {list(wanted)}"
                    )
            if values:
                self._compare(f"result {index}", local, whole, sharding, tolerance)
        if gradients and values:
            self._backward(whole_in, whole_out, local_in, local_out, sharded, tolerance)

    def _call(
        self, inputs: Sequence[Tensor], whole_out: Sequence[Tensor] | None, sharded: Sharded
    ) -> list[Tensor]:
        """The op on the given tensors; on a piece if the whole results are given (their shapes become local)."""
        import torch

        supply = iter(inputs)
        args, kwargs = map_leaves(
            (self.args, self.kwargs), lambda leaf: next(supply) if isinstance(leaf, torch.Tensor) else leaf
        )
        ways = 1
        if whole_out is not None:
            local_shape = sharded.results[0].local_shape(whole_out[0].shape, self.mesh)
            args = localize(args, self.rule, local_shape, self.rule.counts(sharded, self.mesh.sizes))
            ways = self.rule.average_ways(sharded, self.mesh.sizes)
        try:
            results = _tensors(self.op(*args, **kwargs))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if whole_out is None:
                raise
            self._fail(f"the op does not run on a piece: {str(error).splitlines()[0]}")
        return [result / ways for result in results] if ways > 1 else results

    def _backward(
        self,
        whole_in: Sequence[Tensor],
        whole_out: Sequence[Tensor],
        local_in: Mapping[Coordinate, Sequence[Tensor]],
        local_out: Mapping[Coordinate, Sequence[Tensor]],
        sharded: Sharded,
        tolerance: float,
    ) -> None:
        """Results' gradients lie as the results do, whole where those are partial sums; operands' gradients must
        come out split as the operands are, and as sums over `grad_sums`."""
        import torch

        used = [index for index, result in enumerate(whole_out) if result.requires_grad]
        wanting = [index for index, operand in enumerate(whole_in) if operand.requires_grad]
        if not used or not wanting:
            return
        generator = torch.Generator().manual_seed(7)
        given = [
            torch.randn(whole_out[i].shape, dtype=torch.float64, generator=generator).to(whole_out[i].dtype)
            for i in used
        ]
        whole_grads = _gradients([whole_out[i] for i in used], [whole_in[i] for i in wanting], given)
        local_grads = {}
        for at in local_in:
            cotangents = [
                gradient[piece_slices(gradient.shape, Sharding(sharded.results[i].dims), self.mesh, at)]
                for i, gradient in zip(used, given, strict=True)
            ]
            outputs, inputs = [local_out[at][i] for i in used], [local_in[at][i] for i in wanting]
            local_grads[at] = _gradients(outputs, inputs, cotangents)
        for position, index in enumerate(wanting):
            use = sharded.uses[index]
            laid = Sharding(use.sharding.dims, use.grad_sums)
            pieces = {at: gradients[position] for at, gradients in local_grads.items()}
            self._compare(f"the gradient of operand {index}", pieces, whole_grads[position], laid, tolerance)

    def _compare(
        self,
        what: str,
        pieces: Mapping[Coordinate, Tensor],
        whole: Tensor,
        sharding: Sharding,
        tolerance: float,
    ) -> None:
        import torch

        whole = whole.detach()
        for together in assemble(
            {at: piece.detach() for at, piece in pieces.items()}, whole.shape, sharding, self.mesh
        ):
            if not torch.allclose(together, whole, rtol=tolerance, atol=tolerance, equal_nan=True):
                self._fail(f"{what}, put together from {sharding}, is not that of the whole op")

    def _fail(self, what: str) -> NoReturn:
        factors = sorted({f for f in self.choice.values() if f and not f.startswith(SUMS)})
        hint = (
            f"keeping a factor whole ({' or '.join(f'{factor}!' for factor in factors)})"
            if factors
            else "no `sums`"
        )
        raise ShardingError(f"{self.title}: {what}", hint=hint)


def _tensors(value: Any) -> list[Tensor]:
    import torch

    return [leaf for leaf in leaves([value]) if isinstance(leaf, torch.Tensor)]


def _leaf(tensor: Tensor, gradients: bool) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_() if gradients and copy.is_floating_point() else copy


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    import torch

    found = torch.autograd.grad(list(outputs), list(inputs), list(given), allow_unused=True)
    return [
        torch.zeros_like(x) if gradient is None else gradient
        for x, gradient in zip(inputs, found, strict=True)
    ]
