"""Functions: every `torch.autograd.Function` that a model applies stays one op of the captured graph.

In:  a model being exported; then the exported graph.
Out: the graph with one node per application, which applies the function itself, backward included.

torch.export looks through `Function.apply`, at its forward alone: a straight-through estimator would be captured as
the rounding it does, whose gradient is zero. So while a model is exported, an application becomes an op that exists
only in the exported graph, and afterwards a call of `Function.apply` again:

    %function = autopar.function([%weight], "0", ...)     ->     %function = models.StraightThrough(%weight)

It is kept whole until it has a rule: `register_rule("models::StraightThrough", "... -> ...")`, with the name of the
package that the class is in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.errors import CaptureError
from autopar.passes.pending import settled
from autopar.torch_private import pytree, version

torch.library.define("autopar::function", "(Tensor[] values, str key, str outputs) -> Tensor[]")
FUNCTION = torch.ops.autopar.function.default

# Functions of torch are written for tracing, and some call back into the model.
_TORCH = ("torch.", "autopar.")
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)


@torch.library.register_fake("autopar::function")  # type: ignore[untyped-decorator]
def _fake_function(values: Sequence[Tensor], key: str, outputs: str) -> list[Tensor]:
    found = []
    for text in outputs.split(";"):
        dtype, sizes, strides, device = text.split("|")
        shape, stride = (tuple(int(n) for n in numbers.split(",") if n) for numbers in (sizes, strides))
        found.append(torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device))
    return found


def _described(tensor: Tensor) -> str:
    sizes, strides = (",".join(map(str, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return f"{str(tensor.dtype).removeprefix('torch.')}|{sizes}|{strides}|{tensor.device}"


class Functions:
    """The functions that one capture met: `applied` while exporting, `restore` on the exported graph."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[..., Any]] = {}
        self.keys: dict[str, str] = {}  # class and plain arguments -> key

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While exporting: `apply` of every Function becomes an op."""
        base: Any = torch.autograd.Function
        original = base.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            plain = original.__func__
            args = tuple(settled(argument) for argument in args)
            if f"{cls.__module__}.".startswith(_TORCH):
                return plain(cls, *args, **kwargs)
            return self._applied(cls, lambda *a, **k: plain(cls, *a, **k), args, kwargs)

        base.apply = classmethod(apply)
        try:
            yield
        finally:
            base.apply = original

    def _applied(self, cls: Any, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise CaptureError(
                    f"the autograd.Function {cls.__qualname__} is given a {type(leaf).__name__}, which a captured "
                    "graph cannot hold",
                    hint="to give it tensors and plain values only",
                )
        before = [version(tensor) for tensor in tensors]
        results = apply(*args, **kwargs)  # what it records is used by nothing, and goes
        if [version(tensor) for tensor in tensors] != before:
            raise CaptureError(
                f"the autograd.Function {cls.__qualname__} changes a tensor in place",
                hint="a forward that returns a new tensor",
            )
        made, result_structure = pytree.tree_flatten(results)
        outputs = [leaf for leaf in made if isinstance(leaf, Tensor)]
        if not outputs:
            return results
        plain = [None if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        text = f"{cls.__module__}.{cls.__qualname__} {id(cls)} {structure} {plain}"
        key = self.keys.setdefault(text, str(len(self.keys)))
        if key not in self.calls:
            self.calls[key] = _call(cls, leaves, structure)
        values = iter(FUNCTION(tensors, key, ";".join(map(_described, outputs))))
        return pytree.tree_unflatten(
            [next(values) if isinstance(leaf, Tensor) else leaf for leaf in made], result_structure
        )

    def restore(self, graph: Graph) -> None:
        """Put calls of the functions themselves in place of the ops."""
        for node in list(graph.nodes):
            if node.target is not FUNCTION:
                continue
            values, key = node.args[0], node.args[1]
            assert isinstance(values, (list, tuple))
            assert isinstance(key, str)
            results = node.meta["val"]
            if len(results) > 1:
                node.target, node.args = self.calls[key], tuple(values)
                continue
            first: Node | None = None  # a lone result keeps its own name, by which it may be an output
            for user in list(node.users):
                assert user.target is operator.getitem
                if first is None:
                    first, user.target, user.args = user, self.calls[key], tuple(values)
                else:
                    user.target, user.args = torch.ops.aten.alias.default, (first,)
            graph.erase_node(node)


def _call(cls: Any, leaves: Sequence[Any], structure: Any) -> Callable[..., Any]:
    """A function of the tensors alone, named as the class is: its result, or the tensors among its results."""
    given = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(*tensors: Tensor) -> Any:
        filled = list(given)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, structure)
        made = [leaf for leaf in pytree.tree_leaves(cls.apply(*args, **kwargs)) if isinstance(leaf, Tensor)]
        return made[0] if len(made) == 1 else tuple(made)

    call.__name__ = call.__qualname__ = cls.__name__
    call.__module__ = cls.__module__
    return call
