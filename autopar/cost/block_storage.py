"""What one block's values take: for each op the storages it takes, makes and saves for its backward.

In:  a Problem at the micro-batch's size with a placement.
Out: per block a `BlockStorage`: a Storage per form of a value, that is, per sharding its users want it in.

A value that an op wants in another sharding is a second storage, unless the way there only cuts a view; what a fused
kernel makes inside has no size, and what its backward needs of it, is saved as what the kernel takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from autopar.cost.alive import LOGITS, WORKSPACE, Storage
from autopar.cost.compute import LINEAR, fused_values, kind_of
from autopar.cost.experts import inside, is_experts
from autopar.mesh import Mesh
from autopar.problem import Choice, Op, Problem, Value
from autopar.sharding import Sharding, Use, reshard_steps

# Ops whose gradient needs their result and not their operand.
KEEPS_RESULT = frozenset(
    f"aten.{name}"
    for name in ("exp", "rsqrt", "sqrt", "tanh", "sigmoid", "relu", "reciprocal", "softmax", "_softmax")
)
PRODUCTS = frozenset(f"aten.{name}" for name in ("mul", "div", "true_divide"))


class Setting:
    """A placed Problem, and what follows from it for all of its blocks."""

    def __init__(
        self,
        problem: Problem,
        mesh: Mesh,
        choices: Mapping[str, Choice],
        shardings: Mapping[str, Sharding],
        item_bytes: Mapping[str, int],
        fused: bool,
    ) -> None:
        self.problem, self.mesh, self.choices, self.shardings = problem, mesh, choices, shardings
        self.item_bytes, self.fused = item_bytes, fused
        self.inside = fused_values(problem) if fused else frozenset()
        self.makers = {name: op for op in problem.ops for name in op.results}
        self.arriving = {
            value.interface: shardings[name]
            for name, value in problem.values.items()
            if value.interface and name not in self.makers
        }
        self.near_loss = near_loss(problem, self.makers)

    def elements(self, name: str, sharding: Sharding) -> float:
        ways = self.mesh.size(*(axis for axes in sharding.dims for axis in axes))
        return math.prod(self.problem.values[name].info.shape) / ways

    def size(self, name: str, sharding: Sharding) -> float:
        return self.elements(name, sharding) * self.item_bytes[self.problem.values[name].info.dtype]

    def uses(self, op: Op) -> list[Use]:
        if op.rule is None:
            return [Use(Sharding.whole(len(self.problem.values[name].info.shape))) for name in op.operands]
        return list(op.rule.shard(self.choices[op.name], self.mesh.sizes).uses)


Form = tuple[str, Sharding, tuple[str, ...]]  # a value as its users want it: sharding, sums of its gradient
RESULT: Form = ("", Sharding(()), ())  # stands for a value as it is made


class BlockStorage:
    """One block: its ops, with the storages they take, make and save.

    Per op: `taken`, the forms of its operands; `made`, the storages of its results. `outputs`: the forms that the block
    hands on, and whether they have a gradient. A Storage knows its last user and the ops whose backward needs it.
    """

    def __init__(self, setting: Setting, name: str, ops: Sequence[Op]) -> None:
        self.setting, self.name, self.ops = setting, name, ops
        self.values = setting.problem.values
        self.storage: dict[Form, Storage] = {}
        self.made_at: dict[Form, int] = {}  # forms that steps make, and the op before which
        mine = [value for value in self.values.values() if value.name.split("/", 1)[0] == name]
        self.state = [value.name for value in mine if value.state and value.gradient]
        self.inputs = [value for value in mine if not value.state and value.name not in setting.makers]
        end = len(ops)
        for value in self.inputs:
            self.base(value.name).last = end
        self.taken: list[list[Form]] = []
        self.made: list[list[Storage]] = []
        self.place = {result: index for index, op in enumerate(ops) for result in op.results}
        for index, op in enumerate(ops):
            self._trace(index, op)
        self.outputs = self._outputs(end)

    # ---- what is where -------------------------------------------------------------------------------------

    def base(self, name: str) -> Storage:
        """A value as it is made, or as it arrives."""
        form = (name, self.setting.shardings[name], ())
        if form not in self.storage:
            value = self.values[name]
            counted = not value.state and name not in self.setting.inside
            kind = LOGITS if self._makes_logits(name) else WORKSPACE
            self.storage[form] = Storage(self.setting.size(name, form[1]) if counted else 0.0, kind)
        return self.storage[form]

    def _makes_logits(self, name: str) -> bool:
        maker = self.setting.makers.get(name)
        return maker is not None and maker.name in self.setting.near_loss

    def _form(self, index: int, name: str, use: Use) -> Form:
        """The value as the op of this index wants it, made by steps where it is not so already."""
        made = self.setting.shardings[name]
        sums = use.grad_sums if self.values[name].gradient and not self.values[name].state else ()
        form = (name, use.sharding, sums)
        base = self.base(name)
        base.last = max(base.last, index)
        if use.sharding == made and not sums:
            return (name, made, ())
        if form not in self.storage:
            moved = [step for step in reshard_steps(made, use) if step.kind != "copy"]
            size = self.setting.size(name, use.sharding) if base.size or not self.values[name].state else 0.0
            self.storage[form] = Storage(size, base.kind) if moved else base
            self.made_at[form] = index
        self.storage[form].last = max(self.storage[form].last, index)
        return form

    def _trace(self, index: int, op: Op) -> None:
        forms = [
            self._form(index, name, use) for name, use in zip(op.operands, self.setting.uses(op), strict=True)
        ]
        results = [name for name in op.results if name in self.values]
        for name in results:
            if op.free and forms:
                self.storage[name, self.setting.shardings[name], ()] = self.storage[forms[0]]
        self.taken.append(forms)
        self.made.append([self.base(name) for name in results])
        for storage in self.made[-1]:
            storage.last = max(storage.last, index)
        if not op.free and any(self.values[name].gradient for name in results):
            for name, form in kept_of(op, self.values, forms):
                self._save(index, name, form)

    def _save(self, index: int, name: str, form: Form) -> None:
        """A fused kernel makes its inner values again from what it takes; a saved view keeps what it views."""
        while name in self.setting.makers and self.setting.makers[name].free:
            name = self.setting.makers[name].operands[0]
        if name in self.setting.inside:
            place = self.place[name]
            for operand, other in zip(self.ops[place].operands, self.taken[place], strict=True):
                self._save(index, operand, other)
            return
        (self.base(name) if form is RESULT else self.storage[form]).savers.append(index)

    def _outputs(self, end: int) -> list[tuple[Form, bool]]:
        """(form, whether it has a gradient) of what the block hands on."""
        found = []
        for op in self.ops:
            for name in op.results:
                value = self.values.get(name)
                if value is not None and (value.interface or name in self.setting.problem.outputs):
                    whole = Sharding.whole(len(value.info.shape))
                    use = Use(self.setting.arriving.get(value.interface or "", whole))
                    found.append((self._form(end, name, use), value.gradient))
        return found

    # ---- sizes ---------------------------------------------------------------------------------------------

    def storages(self) -> Iterable[Storage]:
        return dict.fromkeys(self.storage.values())

    def kept_state(self) -> set[str]:
        """Parameters of which autograd saves the copy the block takes."""
        found = set()
        for op, forms in zip(self.ops, self.taken, strict=True):
            if not op.free:
                for name, _ in kept_of(op, self.values, forms):
                    while name in self.setting.makers and self.setting.makers[name].free:
                        name = self.setting.makers[name].operands[0]
                    found.add(name)
        return found

    def size_of(self, form: Form) -> float:
        return 0.0 if form[0] in self.setting.inside else self.setting.size(form[0], form[1])

    def size_of_result(self, name: str) -> float:
        return self.size_of((name, self.setting.shardings[name], ()))

    def loss_of(self, op: Op) -> tuple[float, int]:
        """(elements, bytes of one) of a cross-entropy's logits on this rank."""
        form = (op.operands[0], self.setting.uses(op)[0].sharding)
        return self.setting.elements(*form), self.setting.item_bytes[self.values[form[0]].info.dtype]

    def cross_entropy_bytes(self) -> float:
        """The softmax, in fp32, kept from forward to backward."""
        losses = [op for op in self.ops if kind_of(op) == "cross_entropy"]
        return sum(elements * max(item, 4) for elements, item in map(self.loss_of, losses))

    def experts_bytes(self, op: Op) -> float:
        """What an op of experts keeps inside."""
        if not is_experts(op):
            return 0.0
        assert op.rule is not None
        split = op.rule.shard(self.setting.choices[op.name], self.setting.mesh.sizes).by_factor
        elements = inside(op, split, self.setting.mesh.sizes).kept_elements(self.setting.fused)
        return elements * self.setting.item_bytes[self.values[op.operands[0]].info.dtype]

    def moving(self, form: Form) -> float:
        """What the steps to a form (or of its gradient back) hold for a moment beside their operand and result: pieces
        along another dim than the first are put in order before or after they travel."""
        name, sharding, sums = form
        extra = 0.0
        for step in reshard_steps(self.setting.shardings[name], Use(sharding, sums)):
            large = max(self.size_of(form), self.setting.size(name, self.setting.shardings[name]))
            if step.kind == "all_to_all" or (
                step.kind in ("all_gather", "reduce_scatter", "slice") and step.dim > 0
            ):
                extra = max(extra, large)
        return extra


def is_split_lookup(op: Op, setting: Setting) -> bool:
    """An embedding of which a rank has some rows: the rows of others are then zeroed, beside those found."""
    if kind_of(op) != "embedding" or op.rule is None:
        return False
    return bool(op.rule.special & set(op.rule.shard(setting.choices[op.name], setting.mesh.sizes).by_factor))


def near_loss(problem: Problem, makers: Mapping[str, Op]) -> set[str]:
    """The ops between the last product and the loss, that product included: their results are counted as logits."""
    found: set[str] = set()
    for op in problem.ops:
        name = op.operands[0] if kind_of(op) == "cross_entropy" else ""
        while name in makers:
            found.add(makers[name].name)
            name = makers[name].operands[0] if kind_of(makers[name]) in ("free", "pointwise") else ""
    return found


def kept_of(op: Op, values: Mapping[str, Value], forms: Sequence[Form]) -> Iterable[tuple[str, Form]]:
    """What the backward of one op needs, as torch's derivatives.yaml has it. The loss keeps its own softmax."""
    gradients = [values[name].gradient for name in op.operands]
    operands = [(form[0], form) for form in forms]
    kind = kind_of(op)
    if kind == "cross_entropy":
        return []
    if kind == "embedding":
        return operands[1:]
    if kind == "matmul" or op.kind in PRODUCTS:
        return [
            operand
            for index, operand in enumerate(operands)
            if any(flows for other, flows in enumerate(gradients) if other != index)
        ]
    if op.kind in LINEAR:
        return []
    results = [(name, RESULT) for name in op.results if name in values]
    if kind == "attention":
        return [*operands, *results]
    return results if op.kind in KEEPS_RESULT else operands
