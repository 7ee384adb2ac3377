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

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.alive import ACTIVATIONS, BUFFERS, GRADIENTS, LOGITS, WEIGHTS, WORKSPACE, Alive, Storage
from autopar.cost.block_storage import BlockStorage, Form, Setting, is_split_lookup
from autopar.cost.compute import LINEAR, kind_of
from autopar.mesh import Mesh
from autopar.problem import Choice, Op, Problem
from autopar.sharding import Sharding, Use, reshard_steps

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
    setting = Setting(problem, mesh, choices, shardings, item_bytes, fused)
    return {name: _Block(setting, parameters, name, ops).call() for name, ops in by_block.items()}


class _Block(BlockStorage):
    """One block, run in thought."""

    def __init__(self, setting: Setting, parameters: Parameters, name: str, ops: Sequence[Op]) -> None:
        super().__init__(setting, name, ops)
        self.parameters = parameters

    # ---- the call ------------------------------------------------------------------------------------------

    def call(self) -> Call:
        setting, item = self.setting, self.setting.item_bytes
        saved = {storage for storage in self.storages() if storage.savers}
        for storage in saved:
            storage.kind = ACTIVATIONS if storage.kind == WORKSPACE else storage.kind
        carried = {id(self.base(value.name)) for value in self.inputs if not value.gradient}
        shared = {
            value.interface or value.name: self.base(value.name).size
            for value in self.inputs
            if not value.gradient and not value.source and self.base(value.name) in saved
        }
        for storage in self.storages():
            if id(storage) in carried:  # counted once for all calls
                storage.size = 0.0
        entering = sum(self.base(value.name).size for value in self.inputs if value.gradient)
        whole = sum(setting.elements(name, setting.shardings[name]) for name in self.state)
        whole_bytes = sum(setting.size(name, setting.shardings[name]) for name in self.state)
        narrow = {name for name in self.state if item[self.values[name].info.dtype] < MASTER_BYTES}
        copied = sum(setting.size(name, setting.shardings[name]) for name in narrow)
        kept_copies = sum(setting.size(name, setting.shardings[name]) for name in narrow & self.kept_state())
        if self.parameters.fsdp > 1:
            copied = kept_copies = 0.0
        self.whole, self.whole_bytes, self.kept_copies = whole, whole_bytes, kept_copies
        self.own_gradients = whole * MASTER_BYTES / self.parameters.fsdp
        kept = sum(storage.size for storage in saved) + self.cross_entropy_bytes()
        kept += sum(map(self.experts_bytes, self.ops))
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

    def _coming(self) -> list[Storage]:
        """The gradients of the outputs: there before the backward begins."""
        return [Storage(self.size_of(form)) for form, gradient in self.outputs if gradient]

    def _gather(self, alive: Alive) -> None:
        """All parameters of the call: own rows in one piece, those of all ranks, and each parameter made whole."""
        parameters = self.parameters
        if parameters.fsdp == 1 or parameters.hidden or not self.state:
            return
        if len(self.state) > 1:
            alive.look(self.whole_bytes * (2 + 1 / parameters.fsdp), BUFFERS)
        else:
            alive.look(self.whole_bytes * (1 + 1 / parameters.fsdp), BUFFERS)
        alive.now[BUFFERS] += self.whole_bytes

    # ---- forward -------------------------------------------------------------------------------------------

    def _forward(
        self, saved: set[Storage], copied: float, coming: Iterable[Storage] = ()
    ) -> dict[str, float]:
        alive = Alive(coming)
        for value in self.inputs:
            alive.hold(self.base(value.name))
        alive.now[WEIGHTS] += copied
        self._gather(alive)
        ending: dict[int, list[Storage]] = defaultdict(list)
        for storage in self.storages():
            if storage not in saved:
                ending[storage.last].append(storage)
        for index, op in enumerate(self.ops):
            for form in self.taken[index]:
                if self.made_at.get(form) == index:
                    alive.hold(self.storage[form])
                    alive.look(self.moving(form))
            for storage in self.made[index]:
                alive.hold(storage)
            if kind_of(op) == "cross_entropy":
                elements, item = self.loss_of(op)
                alive.now[LOGITS] += elements * max(item, 4)
            within = self.experts_bytes(op)
            if saved:
                alive.now[ACTIVATIONS] += within
            elif within:
                alive.look(within, ACTIVATIONS)
            alive.look(
                sum(storage.size for storage in self.made[index])
                if is_split_lookup(op, self.setting)
                else 0.0
            )
            for storage in ending[index]:
                alive.free(storage)
        for form, _ in self.outputs:
            alive.hold(self.storage[form])
            if self.made_at.get(form) == len(self.ops):
                alive.look(self.moving(form))
        alive.look()
        return alive.most

    # ---- backward ------------------------------------------------------------------------------------------

    def _backward(self, copies: float, *, again: bool = False) -> dict[str, float]:
        parameters = self.parameters
        coming = self._coming()
        alive = Alive()
        for storage in self.storages():
            if storage.savers:
                alive.hold(storage)
        for value in self.inputs:
            if again and value.gradient:
                alive.hold(self.base(value.name))
        alive.now[WEIGHTS] += copies
        alive.now[LOGITS] += self.cross_entropy_bytes()
        alive.now[ACTIVATIONS] += sum(map(self.experts_bytes, self.ops))
        gradients: dict[Form, Storage] = {}
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
        entered = {self.base(value.name) for value in self.inputs if again and value.gradient}
        released: dict[int, list[Storage]] = defaultdict(list)
        for storage in self.storages():
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
                    elements, item = self.loss_of(op)
                    alive.now[LOGITS] -= elements * max(item, 4)
                alive.now[ACTIVATIONS] -= self.experts_bytes(op)
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
        return self.parameters.fsdp > 1 or self.kept_copies > 0

    def _reduce(self, alive: Alive) -> None:
        """The end of a call's backward: gradients to fp32, and to their own rows."""
        parameters = self.parameters
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
        self, op: Op, forms: Sequence[Form], came: Sequence[Storage]
    ) -> tuple[list[tuple[Form, Storage]], float, float]:
        """What the backward of one op makes: gradients of operands, bytes beside them for a moment, and bytes of
        gradients of parameters."""
        made: list[tuple[Form, Storage]] = []
        extra = owed = 0.0
        result = max((self.size_of_result(name) for name in op.results if name in self.values), default=0.0)
        for form in forms:
            value = self.values[form[0]]
            if not value.gradient:
                continue
            size = self.size_of(form)
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
                elements, item = self.loss_of(op)
                extra = max(extra, elements * (max(item, 4) if item < 4 else 0))
                made.append((form, Storage(size, LOGITS)))
                continue
            if not inside:
                extra = max(extra, _BACKWARD_EXTRA.get(op.kind, 0) * size)
                if kind == "pointwise" and not op.free and size < result and op.kind not in LINEAR:
                    extra = max(extra, result)  # a gradient of the result's size before it is summed
            made.append(
                (
                    form,
                    Storage(
                        0.0 if inside else size,
                        LOGITS if op.name in self.setting.near_loss and size >= result else WORKSPACE,
                    ),
                )
            )
        return made, extra, owed

    def _same_type(self, form: Form, op: Op) -> bool:
        return self.values[form[0]].info.dtype == self.values[op.results[0]].info.dtype

    def _add(self, alive: Alive, gradients: dict[Form, Storage], form: Form, storage: Storage) -> None:
        """Add a gradient to a value's, in place where the first has no other owner."""
        alive.hold(storage)
        storage.owners += 1
        if form not in gradients:
            gradients[form] = storage
            return
        first = gradients[form]
        if first.owners > 1:
            fresh = Storage(storage.size, owners=1)
            alive.hold(fresh)
            alive.look()
            self._drop(alive, first)
            gradients[form] = fresh
        self._drop(alive, storage)

    def _drop(self, alive: Alive, storage: Storage) -> None:
        storage.owners -= 1
        if storage.owners <= 0:
            alive.free(storage)

    def _return(self, alive: Alive, gradients: dict[Form, Storage], index: int) -> None:
        """The gradients of the forms made before this op become those of the values they were made of."""
        for form in [form for form in gradients if self.made_at.get(form) == index]:
            storage = gradients.pop(form)
            base = (form[0], self.setting.shardings[form[0]], ())
            steps = reshard_steps(base[1], Use(form[1], form[2]))
            if all(step.kind == "all_reduce" and not step.grad_sums for step in steps):
                self._add(alive, gradients, base, storage)
                storage.owners -= 1
                continue
            back = Storage(self.size_of(base), storage.kind)
            alive.hold(back)
            alive.look(self.moving(form))
            self._drop(alive, storage)
            self._add(alive, gradients, base, back)


def _fuller(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return max(one, other, key=lambda kinds: sum(kinds.values()))
