"""Places: how many tokens of a batch stand for the features of its images or audio.

In:  an exported graph with its assertions, in which `masked_scatter` puts rows at the places that a mask marks.
Out: per mask that the inputs alone decide, a graph from those inputs to the number of places, and how many there must be.

    mask = input_ids == 3                       PlaceCount(("input_ids",), graph, rows=16, exact=True)
    embeddings.masked_scatter(mask, features)

With fewer places than rows, later rows are left out and nothing else tells; with more, there are no rows to take. A model
that asserts that the two agree (Transformers' do) loses that assertion on export, so `exact` is whether the graph has one
of the mask; without one, more rows than places are right, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autopar.passes.boundary import LAYER_INPUTS, MARKERS
from autopar.passes.capture_checks import place_of
from autopar.program import Condition

_SCATTER = torch.ops.aten.masked_scatter.default
# Ops that leave the number of places as it is, or multiply it evenly (expand).
_SPREADING = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("expand", "unsqueeze", "view", "clone", "alias", "detach", "_to_copy", "_unsafe_view")
)
_LARGEST = 64  # nodes: a mask is a comparison of ids and little else


@dataclass(frozen=True)
class PlaceCount(Condition):
    """`graph` counts the places that are marked; there must be as many as `rows`, or (not `exact`) at most."""

    inputs: tuple[str, ...]
    where: str
    graph: GraphModule
    rows: int
    exact: bool

    @property
    def hint(self) -> str:
        return (
            "one placeholder token for every feature (the processor of this model puts them), and images of the size that "
            "the plan is for"
        )

    def violated(self, batch: Mapping[str, Tensor]) -> str | None:
        count = int(self.graph(*(batch[name].cpu() for name in self.inputs)))
        if count == self.rows or (count < self.rows and not self.exact):
            return None
        return (
            f"{count} tokens of {', '.join(self.inputs)} are for features of images (or audio), and the model makes "
            f"{self.rows} features"
        )


def place_counts(graph: Graph, user_inputs: Mapping[Node, str]) -> tuple[PlaceCount, ...]:
    """One count for each mask and number of rows. Masks that parameters decide (embeddings compared) have none."""
    found: dict[tuple[Node, int], PlaceCount] = {}
    for node in graph.nodes:
        if node.target is not _SCATTER:
            continue
        base, times = _base(node.args[1], node.args[0])
        source = node.args[2].meta.get("val")
        if (
            base is None
            or not isinstance(source, Tensor)
            or not all(isinstance(n, int) for n in source.shape)
        ):
            continue
        cone = _cone(base, user_inputs)
        if cone is None or source.numel() % times:
            continue
        rows = source.numel() // times
        if (base, rows) not in found:
            found[base, rows] = PlaceCount(
                tuple(user_inputs[one] for one in cone if one in user_inputs),
                place_of(node),
                _counting(base, cone),
                rows,
                _asserted(base),
            )
    return tuple(found.values())


def _base(mask: object, taken: object) -> tuple[Node | None, int]:
    """The mask before it is spread over features, and over how many elements each of its places is."""
    while isinstance(mask, Node) and mask.target in _SPREADING:
        mask = mask.args[0]
        if isinstance(mask, Node):
            mask = _outside(mask)
    if not isinstance(mask, Node) or not isinstance(taken, Node):
        return None, 1
    value, whole = mask.meta.get("val"), taken.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(whole, Tensor) or not value.numel():
        return None, 1
    return (mask, whole.numel() // value.numel()) if value.dtype == torch.bool else (None, 1)


def _outside(node: Node) -> Node:
    """What a layer is given, for the node that stands for it inside of the layer."""
    if node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        marker = node.args[0]
        if marker.target is LAYER_INPUTS:
            return _outside(marker.args[0][node.args[1]])  # type: ignore[index, arg-type]
    return node


def _cone(base: Node, user_inputs: Mapping[Node, str]) -> list[Node] | None:
    """The nodes that a mask is made of, in the order of the graph; None unless they are inputs and ops on them."""
    cone, left = {base}, [base]
    while left:
        node = left.pop()
        if node.op != "call_function":
            if node not in user_inputs:
                return None
            continue
        if node.target in MARKERS or len(cone) > _LARGEST or not isinstance(node.meta.get("val"), Tensor):
            return None
        fresh = set(node.all_input_nodes) - cone
        cone |= fresh
        left += fresh
    return [node for node in base.graph.nodes if node in cone]


def _counting(base: Node, cone: list[Node]) -> GraphModule:
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in cone:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(graph.call_function(torch.ops.aten.sum.default, (copied[base],)))
    return GraphModule(torch.nn.Module(), graph)


def _asserted(base: Node) -> bool:
    """Whether something is asserted of a mask's number of places."""
    return any(
        "_assert_scalar" in str(node.target) or "_is_all_true" in str(node.target) for node in _after(base)
    )


def _after(base: Node) -> Iterator[Node]:
    """What is made of the number of a mask's places: through sums, and the sizes of what is indexed by it."""
    seen, left = {base}, [base]
    while left:
        for user in left.pop().users:
            value = user.meta.get("val")
            few = not isinstance(value, Tensor) or value.dim() == 0 or value.dtype == torch.bool
            if user in seen or user.target in MARKERS or user.target is _SCATTER:
                continue
            if few or "index" in str(user.target) or user.target in _SPREADING:
                seen.add(user)
                left.append(user)
                yield user
