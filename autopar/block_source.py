"""Block source: a block of a rank program as a Python function that a person can read and change.

In:  a RankBlock, the mesh it is for, what calls it.
Out: the text of a module with one function: torch's ops and autopar's collectives by name, after each line the local
     shape and the sharding of its result, above each group of lines the line of the model that it comes from.

    # modeling_llama.py:262  attn_output = self.o_proj(attn_output)
    o_proj = F.linear(reshape_4, self_attn_o_proj_weight)        # [4, 16, 32]  [batch@dp, sequence, hidden] + sum(tp)
    reduce_scatter = collectives.reduce_scatter(o_proj, dim=1, group=tp, size=2)      # [4, 8, 32]  [...]

The function computes what the graph computes, bit for bit: the same ops in the same order.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from autopar.mesh import Mesh
from autopar.op_source import Imports, expression, step_sharding
from autopar.passes.lower import RankBlock
from autopar.sharding import Sharding

_COLUMN, _WIDEST = 76, 112
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n([^\n]*)')
# The lines of torch and of autopar say nothing about the model.
_NOT_THE_MODEL = ("/torch/", "/autopar/", "<")
# Results of these are called after their module: `q_proj = F.linear(...)`.
_NAMED_BY_MODULE = ("linear", "addmm", "embedding", "convolution", "layer_norm", "fp8_linear")


@dataclass(frozen=True)
class Form:
    """How a value lies: its local shape, dtype, sharding and the names of its axes (empty where not known)."""

    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    axes: tuple[str, ...] = ()
    whole: tuple[int, ...] = ()

    def text(self, usual: str) -> str:
        """`[2, 16, 64]  [batch@dp, sequence, hidden]`, with the dtype where it is not the usual one."""
        names = self.axes if len(self.axes) == len(self.shape) else ("",) * len(self.shape)
        sizes = self.whole if len(self.whole) == len(self.shape) else self.shape
        dims = [
            (name or str(size)) + ("@" + ".".join(split) if split else "")
            for name, size, split in zip(names, sizes, self.sharding.dims, strict=True)
        ]
        sums = f" + sum({', '.join(self.sharding.sums)})" if self.sharding.sums else ""
        dtype = "" if self.dtype == usual else f"{self.dtype} "
        return f"{dtype}{list(self.shape)}  [{', '.join(dims)}]{sums}"


class Names:
    """Python names that are unique in one function."""

    def __init__(self, reserved: Iterable[str]) -> None:
        self.taken = {*reserved, *keyword.kwlist}

    def fresh(self, wanted: str) -> str:
        clean = re.sub(r"_+", "_", re.sub(r"\W", "_", wanted)).strip("_") or "value"
        clean = f"_{clean}" if clean[0].isdigit() else clean
        name, number = clean, 1
        while name in self.taken:
            number += 1
            name = f"{clean}_{number}"
        self.taken.add(name)
        return name


def identifier(name: str) -> str:
    """A block's name as that of a module and its function."""
    return Names(()).fresh(name)


def block_source(block: RankBlock, mesh: Mesh, paths: Sequence[str]) -> str:
    """The module of one block. `paths`: of the layers that call it. Raises UsageError for what cannot be written."""
    return _Writer(block, mesh, paths).module()


def graph_source(graph: GraphModule, name: str, about: str) -> str:
    """The module of a graph of inputs alone (a count of places in a batch)."""
    inputs = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
    return _Writer(RankBlock(name, graph, (), (), inputs, ()), Mesh(()), (), about=about).module()


class _Writer:
    def __init__(self, block: RankBlock, mesh: Mesh, paths: Sequence[str], about: str = "") -> None:
        self.block, self.mesh, self.paths, self.about = block, mesh, paths, about
        self.nodes = list(block.graph.graph.nodes)
        self.axes = {axis for axis, size in mesh.axes if size > 1}
        self.imports = Imports(self.axes)
        self.names = Names({*mesh.names, *Imports.RESERVED})
        self.named: dict[Node, str] = {}
        self.forms = self._forms()
        kinds = Counter(
            form.dtype for form in self.forms.values() if form.dtype.startswith(("float", "bfloat"))
        )
        self.usual = kinds.most_common(1)[0][0] if kinds else ""

    # ---- what is known of the nodes ------------------------------------------------------------------------

    def _forms(self) -> dict[Node, Form]:
        found: dict[Node, Form] = {}
        for node in self.nodes:
            info, sharding = node.meta.get("global"), node.meta.get("sharding")
            if info is not None and sharding is not None:
                axes = node.meta.get("axes") or _source(node).get("axes") or ()
                shape = tuple(node.meta["local_shape"])
                found[node] = Form(shape, info.dtype, sharding, tuple(axes), tuple(info.shape))
                continue
            operand = node.args[0] if node.op == "call_function" and node.args else None
            if isinstance(operand, Node) and operand in found:
                before = found[operand]
                after = step_sharding(node, before.sharding, self.mesh)
                if after is not None:
                    whole = before.whole
                    found[node] = Form(
                        after.local_shape(whole, self.mesh), before.dtype, after, before.axes, whole
                    )
        return found

    def _place(self, nodes: Sequence[Node]) -> list[tuple[str, str]]:
        """Per node the part of the model (a paragraph) and the line that it comes from. A step between shardings
        stands with what it is made for: the op that comes next."""
        found: list[tuple[str, str] | None] = []
        for node in nodes:
            source = _source(node)
            found.append((self._part(source), _line(source)) if "module" in source else None)
        after: tuple[str, str] | None = next((each for each in reversed(found) if each is not None), ("", ""))
        places = []
        for each in reversed(found):
            after = each if each is not None else after
            assert after is not None
            places.append(after)
        return places[::-1]

    def _part(self, source: Mapping[str, Any]) -> str:
        module = str(source.get("module") or "")
        if module in self.paths:
            return ""
        return module.partition(".")[0] if self.paths else module

    # ---- text ----------------------------------------------------------------------------------------------

    def module(self) -> str:
        arguments = list(self._arguments())
        body = list(self._body())
        function = identifier(self.block.name)
        options = [
            *(
                f"    {axis}: str,  # the group of this axis's ranks"
                for axis in self.mesh.names
                if axis in self.imports.groups
            ),
            *(["    device: torch.device,"] if self.imports.device else []),
        ]
        lines = [
            f'"""{self._title()}"""',
            "",
            *self.imports.lines(),
            "",
            "",
            f"def {function}(",
            *arguments,
            *(["    *,", *options] if options else []),
            ") -> tuple[Tensor, ...]:",
            *body,
        ]
        return "\n".join(lines) + "\n"

    def _title(self) -> str:
        if self.about:
            return plain(self.about)
        where = (
            f"Called once per layer: {_short(self.paths)}."
            if self.paths
            else "What stands outside of the layers."
        )
        dtype = f"\nFloats are {self.usual} where nothing else is said." if self.usual else ""
        return (
            f"{self.block.name}: what one rank computes of it. {where}\n\n"
            f"After each line: the local shape, and how the whole value lies on the mesh ({self.mesh}).{dtype}\n"
        )

    def _arguments(self) -> Iterator[str]:
        places = [node for node in self.nodes if node.op == "placeholder"]
        for index, node in enumerate(places):
            self.named[node] = name = self.names.fresh(node.name)
            form = self.forms.get(node)
            what = form.text(self.usual) if form else "this rank's place on the axis"
            if not self.about and index == len(self.block.coordinates) and self.block.state:
                yield "    # state"
            if not self.about and index == len(self.block.coordinates) + len(self.block.state):
                yield "    # values"
            yield f"    {name}: Tensor,  # {what}" if not self.about else f"    {name}: Tensor,"

    def _body(self) -> Iterator[str]:
        ops = [node for node in self.nodes if node.op == "call_function"]
        places = self._place(ops)
        last = {operand: index for index, node in enumerate(self.nodes) for operand in node.all_input_nodes}
        position = {node: index for index, node in enumerate(self.nodes)}
        alive: list[Node] = []
        for index, (node, (part, line)) in enumerate(zip(ops, places, strict=True)):
            before = places[index - 1] if index else None
            if before is None or before[0] != part:
                if before is not None:
                    yield from self._free(alive, last, position[node])
                    yield ""
                if part:
                    yield f"    # ---- {part}"
            if line and (before is None or before != (part, line)):
                yield f"    # {line}"
            yield self._statement(node)
            alive.append(node)
        output = next(node for node in self.nodes if node.op == "output")
        results = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
        listed = ", ".join(self.named[each] for each in results)
        yield f"    return ({listed},)" if len(results) == 1 else f"    return ({listed})"

    def _free(self, alive: list[Node], last: Mapping[Node, int], now: int) -> Iterator[str]:
        """What nothing later takes: its memory is free for what comes next."""
        done = [node for node in alive if last.get(node, 0) < now]
        for node in done:
            alive.remove(node)
        names = ", ".join(self.named[node] for node in done)
        yield from (f"    del {line.rstrip(',')}" for line in textwrap.wrap(names, _WIDEST - 8))

    def _statement(self, node: Node) -> str:
        code = expression(node, self.named, self.imports)
        self.named[node] = name = self.names.fresh(self._wanted(node))
        line = f"    {name} = {code}"
        form = self.forms.get(node)
        if form is None:
            return line
        comment = f"# {form.text(self.usual)}"
        if len(line) > _COLUMN + 4 and len(line) + len(comment) > _WIDEST:
            return f"{line}\n{' ' * _COLUMN}{comment}"
        return f"{line.ljust(_COLUMN - 2)}  {comment}"

    def _wanted(self, node: Node) -> str:
        target: Any = node.target
        packet = str(getattr(getattr(target, "_schema", None), "name", "")).partition("::")[2]
        base = packet.strip("_") or str(getattr(target, "__name__", "value"))
        module = str(_source(node).get("module") or "")
        if base in _NAMED_BY_MODULE and module and module not in self.paths:
            return module.rpartition(".")[2]
        if base == "getitem":
            return f"{self.named[node.all_input_nodes[0]]}_{node.args[1]}"
        return base


def _source(node: Node) -> Mapping[str, Any]:
    """What capture knows of the op that a node stands for."""
    source = node.meta.get("source")
    return source.meta if isinstance(source, Node) else {}


def _line(source: Mapping[str, Any]) -> str:
    """`modeling_llama.py:146  variance = hidden_states.pow(2).mean(-1, keepdim=True)`: the model's own line."""
    frames = _FRAME.findall(str(source.get("stack_trace") or ""))
    for path, line, code in reversed(frames):
        if not any(part in path for part in _NOT_THE_MODEL):
            return f"{path.rpartition('/')[2]}:{line}  {code.strip()}"
    return ""


def plain(text: str) -> str:
    """A text that may stand in a docstring: names come from models and plans, and are not to become code."""
    return re.sub(r"[^\w .,:;=()\[\]/<>+-]", "_", text)


def _short(paths: Sequence[str]) -> str:
    return plain(paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]} ({len(paths)} of them)")
