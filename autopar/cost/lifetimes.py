"""Lifetimes: which tensors of one call of a block are alive at its fullest moment, forward and backward.

In:  a Problem at the micro-batch's size with a placement, and how parameters reach the blocks.
Out: per block a `Call`: what it keeps for its backward, and the bytes alive, by kind, at the fullest moments.

The block is run in thought, op by op, as eager torch and its autograd engine run it: a result comes into being beside
its operands; a value goes with its last user unless autograd saved it; inputs stay until the call ends, since its
caller holds them. Backward goes through the ops in reverse: gradients of the operands come into being beside the
incoming one, then what the op had saved is let go; a second gradient of a value is added in place where the first has
no other owner. What a fused kernel makes inside has no memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
# Views whose gradient is not a view: zeros around it, or several gradients put together.
_CUTS = frozenset(
    f"aten.{name}" for name in ("slice", "select", "split", "split_with_sizes", "chunk", "unbind")
)
# Ops whose gradient is the incoming one itself, or a view of it, where the sizes agree.
_HANDS_ON = frozenset(
    f"aten.{name}" for name in ("add", "clone", "contiguous", "cat", "_to_copy", "to", "copy")
)
# Gradients' intermediate values of the operand's size: grad * (exponent * x ** (exponent - 1)), -grad * (x / y / y).
_BACKWARD_EXTRA = {"aten.pow": 2, "aten.div": 2}
# The kinds of memory that a call has to do with.
BUFFERS, ACTIVATIONS, LOGITS, WORKSPACE = (
    "gather and reduce buffers",
    "activations",
    "logits and loss",
    "workspace",
)
WEIGHTS, GRADIENTS = "weights", "gradients"
MASTER_BYTES = 4  # of gradients as they are summed and kept


@dataclass(frozen=True)
class Parameters:
    """How parameters reach a block. `fsdp`: ranks that share each (gathered whole for a call, dropped after it).
    `added`: whether gradients are added to those of an earlier micro-batch (else they stay, and the step's gradients
    grow). `hidden`: gathers and reductions are not counted here, since they overlap with compute."""

    fsdp: int = 1
    added: bool = False
    hidden: bool = False


@dataclass(frozen=True)
class Call:
    """Bytes of one call. `kept`: from its forward to its backward (`copies` of them copies of parameters); `entering`:
    the inputs with a gradient, all that a recomputed call keeps; `shared`: inputs without one, which all calls share.
    Fullest moments by kind: `forward`; `passing`, the forward of a call that saves nothing; `backward`; `again`, the
    backward with the forward that is run again before it."""

    kept: float
    entering: float
    shared: Mapping[str, float]
    forward: Mapping[str, float]
    passing: Mapping[str, float]
    backward: Mapping[str, float]
    again: Mapping[str, float]
    copies: float
    gradients: float


def calls(
    problem: Problem,
    mesh: Mesh,
    choices: Mapping[str, Choice],
    shardings: Mapping[str, Sharding],
    item_bytes: Mapping[str, int],
    fused: bool,
    parameters: Parameters,
) -> dict[str, Call]:
    """The Call of every block, in the order of the blocks."""
    by_block: dict[str, list[Op]] = {name.split("/", 1)[0]: [] for name in problem.values}
    for op in problem.ops:
        by_block[op.name.split("/", 1)[0]].append(op)
    setting = _Setting(problem, mesh, choices, shardings, item_bytes, fused, parameters)
    return {name: _Block(setting, name, ops).call() for name, ops in by_block.items()}


@dataclass(eq=False)
class _Storage:
    """Bytes that several values may view. `last`: the op after which the forward needs it no more."""

    size: float
    kind: str = WORKSPACE
    last: int = -1
    savers: list[int] = field(default_factory=list)
    owners: int = 0


class _Alive:
    """What is alive, by kind, and its fullest moment."""

    def __init__(self, start: Iterable[_Storage] = ()) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.most: dict[str, float] = {}
        self.held: set[_Storage] = set()
        for storage in start:
            self.hold(storage)
        self.look()

    def hold(self, storage: _Storage) -> None:
        if storage not in self.held:
            self.held.add(storage)
            self.now[storage.kind] += storage.size

    def free(self, storage: _Storage) -> None:
        if storage in self.held:
            self.held.discard(storage)
            self.now[storage.kind] -= storage.size

    def look(self, extra: float = 0.0, kind: str = WORKSPACE) -> None:
        """Note this moment, with `extra` that is gone right after, if it is the fullest."""
        if sum(self.now.values()) + extra > sum(self.most.values()):
            self.most = {**self.now, kind: self.now[kind] + extra}


class _Setting:
    def __init__(
        self,
        problem: Problem,
        mesh: Mesh,
        choices: Mapping[str, Choice],
        shardings: Mapping[str, Sharding],
        item_bytes: Mapping[str, int],
        fused: bool,
        parameters: Parameters,
    ) -> None:
        self.problem, self.mesh, self.choices, self.shardings = problem, mesh, choices, shardings
        self.item_bytes, self.parameters = item_bytes, parameters
        self.fused = fused
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


_Form = tuple[str, Sharding, tuple[str, ...]]  # a value as its users want it: sharding, sums of its gradient
_RESULT: _Form = ("", Sharding(()), ())  # stands for a value as it is made


class _Block:
    """One block: its ops, with the storages they take, make and save."""

    def __init__(self, setting: _Setting, name: str, ops: Sequence[Op]) -> None:
        self.setting, self.name, self.ops = setting, name, ops
        self.values = setting.problem.values
        self.storage: dict[_Form, _Storage] = {}
        self.made_at: dict[_Form, int] = {}  # forms that steps make, and the op before which
        mine = [value for value in self.values.values() if value.name.split("/", 1)[0] == name]
        self.state = [value.name for value in mine if value.state and value.gradient]
        self.inputs = [value for value in mine if not value.state and value.name not in setting.makers]
        end = len(ops)
        for value in self.inputs:
            self._base(value.name).last = end
        self.taken: list[list[_Form]] = []
        self.made: list[list[_Storage]] = []
        self.place = {result: index for index, op in enumerate(ops) for result in op.results}
        for index, op in enumerate(ops):
            self._trace(index, op)
        self.outputs = self._outputs(end)

    # ---- what is where -------------------------------------------------------------------------------------

    def _base(self, name: str) -> _Storage:
        """A value as it is made, or as it arrives."""
        form = (name, self.setting.shardings[name], ())
        if form not in self.storage:
            value = self.values[name]
            counted = not value.state and name not in self.setting.inside
            kind = LOGITS if self._makes_logits(name) else WORKSPACE
            self.storage[form] = _Storage(self.setting.size(name, form[1]) if counted else 0.0, kind)
        return self.storage[form]

    def _makes_logits(self, name: str) -> bool:
        maker = self.setting.makers.get(name)
        return maker is not None and maker.name in self.setting.near_loss

    def _form(self, index: int, name: str, use: Use) -> _Form:
        """The value as the op of this index wants it, made by steps where it is not so already."""
        made = self.setting.shardings[name]
        sums = use.grad_sums if self.values[name].gradient and not self.values[name].state else ()
        form = (name, use.sharding, sums)
        base = self._base(name)
        base.last = max(base.last, index)
        if use.sharding == made and not sums:
            return (name, made, ())
        if form not in self.storage:
            moved = [step for step in reshard_steps(made, use) if step.kind != "copy"]
            size = self.setting.size(name, use.sharding) if base.size or not self.values[name].state else 0.0
            self.storage[form] = _Storage(size, base.kind) if moved else base
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
        self.made.append([self._base(name) for name in results])
        for storage in self.made[-1]:
            storage.last = max(storage.last, index)
        if not op.free and any(self.values[name].gradient for name in results):
            for name, form in _kept_of(op, self.values, forms):
                self._save(index, name, form)

    def _save(self, index: int, name: str, form: _Form) -> None:
        """A fused kernel makes its inner values again from what it takes; a saved view keeps what it views."""
        while name in self.setting.makers and self.setting.makers[name].free:
            name = self.setting.makers[name].operands[0]
        if name in self.setting.inside:
            place = self.place[name]
            for operand, other in zip(self.ops[place].operands, self.taken[place], strict=True):
                self._save(index, operand, other)
            return
        (self._base(name) if form is _RESULT else self.storage[form]).savers.append(index)

    def _outputs(self, end: int) -> list[tuple[_Form, bool]]:
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

    # ---- the call ------------------------------------------------------------------------------------------

    def call(self) -> Call:
        setting, item = self.setting, self.setting.item_bytes
        saved = {storage for storage in self._storages() if storage.savers}
        for storage in saved:
            storage.kind = ACTIVATIONS if storage.kind == WORKSPACE else storage.kind
        carried = {id(self._base(value.name)) for value in self.inputs if not value.gradient}
        shared = {
            value.interface or value.name: self._base(value.name).size
            for value in self.inputs
            if not value.gradient and not value.source and self._base(value.name) in saved
        }
        for storage in self._storages():
            if id(storage) in carried:  # counted once for all calls
                storage.size = 0.0
        entering = sum(self._base(value.name).size for value in self.inputs if value.gradient)
        whole = sum(setting.elements(name, setting.shardings[name]) for name in self.state)
        whole_bytes = sum(setting.size(name, setting.shardings[name]) for name in self.state)
        narrow = {name for name in self.state if item[self.values[name].info.dtype] < MASTER_BYTES}
        copied = sum(setting.size(name, setting.shardings[name]) for name in narrow)
        kept_copies = sum(setting.size(name, setting.shardings[name]) for name in narrow & self._kept_state())
        if setting.parameters.fsdp > 1:
            copied = kept_copies = 0.0
        self.whole, self.whole_bytes, self.kept_copies = whole, whole_bytes, kept_copies
        self.own_gradients = whole * MASTER_BYTES / setting.parameters.fsdp
        kept = sum(storage.size for storage in saved) + self._cross_entropy_bytes()
        kept += sum(map(self._experts_bytes, self.ops))
        backward = self._backward(kept_copies)
        return Call(
            kept=kept + kept_copies,
            entering=entering,
            shared=shared,
            forward=self._forward(saved, copied),
            passing=self._forward(set(), copied),
            backward=backward,
            again=_fuller(
                self._forward(saved, copied, coming=self._coming()), self._backward(kept_copies, again=True)
            ),
            copies=kept_copies,
            gradients=self.own_gradients,
        )

    def _storages(self) -> Iterable[_Storage]:
        return dict.fromkeys(self.storage.values())

    def _kept_state(self) -> set[str]:
        """Parameters of which autograd saves the copy the block takes."""
        found = set()
        for op, forms in zip(self.ops, self.taken, strict=True):
            if not op.free:
                for name, _ in _kept_of(op, self.values, forms):
                    while name in self.setting.makers and self.setting.makers[name].free:
                        name = self.setting.makers[name].operands[0]
                    found.add(name)
        return found

    def _coming(self) -> list[_Storage]:
        """The gradients of the outputs: there before the backward begins."""
        return [_Storage(self._size(form)) for form, gradient in self.outputs if gradient]

    def _size(self, form: _Form) -> float:
        return 0.0 if form[0] in self.setting.inside else self.setting.size(form[0], form[1])

    def _gather(self, alive: _Alive) -> None:
        """All parameters of the call: own rows in one piece, those of all ranks, and each parameter made whole."""
        parameters = self.setting.parameters
        if parameters.fsdp == 1 or parameters.hidden or not self.state:
            return
        if len(self.state) > 1:
            alive.look(self.whole_bytes * (2 + 1 / parameters.fsdp), BUFFERS)
        else:
            alive.look(self.whole_bytes * (1 + 1 / parameters.fsdp), BUFFERS)
        alive.now[BUFFERS] += self.whole_bytes

    def _loss(self, op: Op) -> tuple[float, int]:
        """(elements, bytes of one) of a cross-entropy's logits on this rank."""
        form = (op.operands[0], self.setting.uses(op)[0].sharding)
        return self.setting.elements(*form), self.setting.item_bytes[self.values[form[0]].info.dtype]

    def _cross_entropy_bytes(self) -> float:
        """The softmax, in fp32, kept from forward to backward."""
        losses = [op for op in self.ops if kind_of(op) == "cross_entropy"]
        return sum(elements * max(item, 4) for elements, item in map(self._loss, losses))

    def _experts_bytes(self, op: Op) -> float:
        """What an op of experts keeps inside."""
        if not is_experts(op):
            return 0.0
        assert op.rule is not None
        split = op.rule.shard(self.setting.choices[op.name], self.setting.mesh.sizes).by_factor
        elements = inside(op, split, self.setting.mesh.sizes).kept_elements(self.setting.fused)
        return elements * self.setting.item_bytes[self.values[op.operands[0]].info.dtype]

    # ---- forward -------------------------------------------------------------------------------------------

    def _forward(
        self, saved: set[_Storage], copied: float, coming: Iterable[_Storage] = ()
    ) -> dict[str, float]:
        alive = _Alive(coming)
        for value in self.inputs:
            alive.hold(self._base(value.name))
        alive.now[WEIGHTS] += copied
        self._gather(alive)
        ending: dict[int, list[_Storage]] = defaultdict(list)
        for storage in self._storages():
            if storage not in saved:
                ending[storage.last].append(storage)
        for index, op in enumerate(self.ops):
            for form in self.taken[index]:
                if self.made_at.get(form) == index:
                    alive.hold(self.storage[form])
                    alive.look(self._moving(form))
            for storage in self.made[index]:
                alive.hold(storage)
            if kind_of(op) == "cross_entropy":
                elements, item = self._loss(op)
                alive.now[LOGITS] += elements * max(item, 4)
            within = self._experts_bytes(op)
            if saved:
                alive.now[ACTIVATIONS] += within
            elif within:
                alive.look(within, ACTIVATIONS)
            alive.look(
                sum(storage.size for storage in self.made[index])
                if _is_split_lookup(op, self.setting)
                else 0.0
            )
            for storage in ending[index]:
                alive.free(storage)
        for form, _ in self.outputs:
            alive.hold(self.storage[form])
            if self.made_at.get(form) == len(self.ops):
                alive.look(self._moving(form))
        alive.look()
        return alive.most

    def _moving(self, form: _Form, backward: bool = False) -> float:
        """What the steps to a form (or of its gradient back) hold for a moment beside their operand and result: pieces
        along another dim than the first are put in order before or after they travel."""
        name, sharding, sums = form
        extra = 0.0
        for step in reshard_steps(self.setting.shardings[name], Use(sharding, sums)):
            large = max(self._size(form), self.setting.size(name, self.setting.shardings[name]))
            if step.kind == "all_to_all" or (
                step.kind in ("all_gather", "reduce_scatter", "slice") and step.dim > 0
            ):
                extra = max(extra, large)
        return extra

    # ---- backward ------------------------------------------------------------------------------------------

    def _backward(self, copies: float, *, again: bool = False) -> dict[str, float]:
        parameters = self.setting.parameters
        coming = self._coming()
        alive = _Alive()
        for storage in self._storages():
            if storage.savers:
                alive.hold(storage)
        for value in self.inputs:
            if again and value.gradient:
                alive.hold(self._base(value.name))
        alive.now[WEIGHTS] += copies
        alive.now[LOGITS] += self._cross_entropy_bytes()
        alive.now[ACTIVATIONS] += sum(map(self._experts_bytes, self.ops))
        gradients: dict[_Form, _Storage] = {}
        gradient_forms = [form for form, gradient in self.outputs if gradient]
        for form, storage in zip(gradient_forms, coming, strict=True):
            self._add(alive, gradients, form, storage)
        self._return(alive, gradients, len(self.ops))
        alive.look()
        gathered = 0.0
        if again and parameters.fsdp > 1 and not parameters.hidden:
            gathered = (
                self.whole_bytes
            )  # those of the forward that was run again; each goes with its last user
            alive.now[BUFFERS] += gathered
        else:
            self._gather(alive)
        alive.look()
        entered = {self._base(value.name) for value in self.inputs if again and value.gradient}
        released: dict[int, list[_Storage]] = defaultdict(list)
        for storage in self._storages():
            if storage.savers and storage not in entered:
                released[min(storage.savers)].append(storage)
        for index in range(len(self.ops) - 1, -1, -1):
            op = self.ops[index]
            incoming = [
                gradients.pop((name, self.setting.shardings[name], ()), None)
                for name in op.results
                if name in self.values
            ]
            came = [storage for storage in incoming if storage is not None]
            is_loss = kind_of(op) == "cross_entropy"
            if came or (is_loss and self.values[op.results[0]].gradient):
                outgoing, extra, owed = self._gradients_of(op, self.taken[index], came)
                for _, storage in outgoing:
                    alive.hold(storage)
                alive.now[GRADIENTS] += owed
                if not op.free:
                    alive.look(extra)
                if not self._waits() and parameters.added:
                    alive.now[GRADIENTS] -= owed
                if gathered:
                    alive.now[BUFFERS] -= owed
                    gathered -= owed
                for storage in came:
                    self._drop(alive, storage)
                for storage in released[index]:
                    alive.free(storage)
                if is_loss:
                    elements, item = self._loss(op)
                    alive.now[LOGITS] -= elements * max(item, 4)
                alive.now[ACTIVATIONS] -= self._experts_bytes(op)
                for form, storage in outgoing:
                    self._add(alive, gradients, form, storage)
            self._return(alive, gradients, index)
        if parameters.fsdp > 1 and not parameters.hidden:
            alive.now[BUFFERS] -= gathered if again else self.whole_bytes
        self._reduce(alive)
        return alive.most

    def _waits(self) -> bool:
        """Whether gradients of parameters stay as the block makes them until the call ends: the copy or the gather that
        they go through came before all ops of the call."""
        return self.setting.parameters.fsdp > 1 or self.kept_copies > 0

    def _reduce(self, alive: _Alive) -> None:
        """The end of a call's backward: gradients to fp32, and to their own rows."""
        parameters = self.setting.parameters
        if not self._waits():
            return
        whole = self.whole * MASTER_BYTES
        if parameters.fsdp == 1:
            alive.look(self.own_gradients, GRADIENTS)
            return
        if parameters.hidden:
            return
        alive.look(whole + 2 * whole / parameters.fsdp, BUFFERS)

    def _gradients_of(
        self, op: Op, forms: Sequence[_Form], came: Sequence[_Storage]
    ) -> tuple[list[tuple[_Form, _Storage]], float, float]:
        """What the backward of one op makes: gradients of operands, bytes beside them for a moment, and bytes of
        gradients of parameters."""
        made: list[tuple[_Form, _Storage]] = []
        extra = owed = 0.0
        result = max((self._size_of_result(name) for name in op.results if name in self.values), default=0.0)
        for form in forms:
            value = self.values[form[0]]
            if not value.gradient:
                continue
            size = self._size(form)
            inside = form[0] in self.setting.inside
            if value.state:
                # A view of a parameter has the gradient of all of it.
                owed += size
                extra = max(
                    extra,
                    result - size
                    if kind_of(op) == "pointwise" and not op.free and op.kind not in _HANDS_ON
                    else 0.0,
                )
                continue
            kind = kind_of(op)
            alias = came and (
                (op.free and op.kind not in _CUTS and size >= result)
                or (op.kind in _HANDS_ON and size >= result and self._same_type(form, op))
                or op.kind == "aten.cat"
            )
            if alias:
                made.append((form, came[0]))
                continue
            if kind == "cross_entropy":
                elements, item = self._loss(op)
                extra = max(extra, elements * (max(item, 4) if item < 4 else 0))
                made.append((form, _Storage(size, LOGITS)))
                continue
            if not inside:
                extra = max(extra, _BACKWARD_EXTRA.get(op.kind, 0) * size)
                if kind == "pointwise" and not op.free and size < result and op.kind not in LINEAR:
                    extra = max(extra, result)  # a gradient of the result's size before it is summed
            made.append(
                (
                    form,
                    _Storage(
                        0.0 if inside else size,
                        LOGITS if op.name in self.setting.near_loss and size >= result else WORKSPACE,
                    ),
                )
            )
        return made, extra, owed

    def _size_of_result(self, name: str) -> float:
        return self._size((name, self.setting.shardings[name], ()))

    def _same_type(self, form: _Form, op: Op) -> bool:
        return self.values[form[0]].info.dtype == self.values[op.results[0]].info.dtype

    def _add(self, alive: _Alive, gradients: dict[_Form, _Storage], form: _Form, storage: _Storage) -> None:
        """Add a gradient to a value's, in place where the first has no other owner."""
        alive.hold(storage)
        storage.owners += 1
        if form not in gradients:
            gradients[form] = storage
            return
        first = gradients[form]
        if first.owners > 1:
            fresh = _Storage(storage.size, owners=1)
            alive.hold(fresh)
            alive.look()
            self._drop(alive, first)
            gradients[form] = fresh
        self._drop(alive, storage)

    def _drop(self, alive: _Alive, storage: _Storage) -> None:
        storage.owners -= 1
        if storage.owners <= 0:
            alive.free(storage)

    def _return(self, alive: _Alive, gradients: dict[_Form, _Storage], index: int) -> None:
        """The gradients of the forms made before this op become those of the values they were made of."""
        for form in [form for form in gradients if self.made_at.get(form) == index]:
            storage = gradients.pop(form)
            base = (form[0], self.setting.shardings[form[0]], ())
            steps = reshard_steps(base[1], Use(form[1], form[2]))
            if all(step.kind == "all_reduce" and not step.grad_sums for step in steps):
                self._add(alive, gradients, base, storage)
                storage.owners -= 1
                continue
            back = _Storage(self._size(base), storage.kind)
            alive.hold(back)
            alive.look(self._moving(form))
            self._drop(alive, storage)
            self._add(alive, gradients, base, back)


def _fuller(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return max(one, other, key=lambda kinds: sum(kinds.values()))


def _is_split_lookup(op: Op, setting: _Setting) -> bool:
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


def _kept_of(op: Op, values: Mapping[str, Value], forms: Sequence[_Form]) -> Iterable[tuple[str, _Form]]:
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
    results = [(name, _RESULT) for name in op.results if name in values]
    if kind == "attention":
        return [*operands, *results]
    return results if op.kind in KEEPS_RESULT else operands
