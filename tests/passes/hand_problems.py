"""Problems written by hand: the text form of `autopar.problem`, a transformer layer, and random small ones."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from autopar.problem import Op, Problem, Value
from autopar.program import TensorInfo
from autopar.rules.rule import Rule

_VALUE = re.compile(r"value (\S+): (\w+)\[([\d, ]*)\]\s*(?:\(([^)]*)\))?\s*(.*)")
_OP = re.compile(
    r"op (\S+) = (\S+)\(([^)]*)\) -> ([\w/, ]+?) x(\d+): (.+?)(?:\s*\{([^}]*)\})?(?: options (.*))?"
)


def parse_problem(text: str, *, outputs: Sequence[str], batch: int, **fields: object) -> Problem:
    """Values and ops, one a line; an op names its results, and options of its rule as `name=python literal`."""
    values: dict[str, Value] = {}
    ops: list[Op] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if match := _VALUE.fullmatch(line):
            name, dtype, shape, axes, words = match.groups()
            info = TensorInfo(tuple(int(size) for size in shape.split(",") if size.strip()), dtype)
            interface = next((word[10:] for word in words.split() if word.startswith("interface=")), None)
            named = tuple(axis.strip("_") for axis in axes.split()) if axes else ("",) * len(info.shape)
            flags = {word: True for word in words.split() if "=" not in word}
            values[name] = Value(name, info, named, interface=interface, **flags)
        elif match := _OP.fullmatch(line):
            name, kind, operands, results, times, rule, logical, options = match.groups()
            ops.append(
                _op(values, name, kind, _names(operands), _names(results), int(times), rule, logical, options)
            )
        else:
            raise ValueError(f"cannot read {line!r}")
    return Problem(values, tuple(ops), tuple(outputs), batch, **fields)  # type: ignore[arg-type]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _op(
    values: Mapping[str, Value],
    name: str,
    kind: str,
    operands: tuple[str, ...],
    results: tuple[str, ...],
    times: int,
    rule: str,
    logical: str | None,
    options: str | None,
) -> Op:
    from dataclasses import replace

    named = dict(pair.split(": ") for pair in (logical or "").split(", ") if pair)
    if rule == "no rule":
        return Op(name, kind, operands, results, None, times, logical=named)
    parsed = Rule.parse(
        rule, [values[item].info.shape for item in operands], [values[item].info.shape for item in results]
    )
    extra = eval(f"dict({options or ''})")  # test data only
    free = bool(extra.pop("free", False))
    return Op(name, kind, operands, results, replace(parsed, **extra), times, free, named)


def layer_problem(
    batch: int = 4, seq: int = 512, hidden: int = 1024, ffn: int = 4096, heads: int = 16, times: int = 4
) -> Problem:
    """A pre-norm transformer layer without rotary embeddings, between an embedding and a loss."""
    width = hidden // heads
    x, vocab, kv = f"{batch}, {seq}, {hidden}", 32000, 2
    both = "sums=((0,), (1,)), flops_per_point=2.0"
    return parse_problem(
        f"""
        value in/ids: int64[{batch}, {seq}] (batch sequence) source
        value in/table: bfloat16[{vocab}, {hidden}] state gradient
        value in/x: bfloat16[{x}] gradient interface=hidden
        op in/embed = aten.embedding(in/table, in/ids) -> in/x x1: v h, b s -> b s h {{b: batch, s: sequence}} options special=frozenset('v'), lowering='embedding'
        value layer/x: bfloat16[{x}] gradient interface=hidden
        value layer/norm: bfloat16[{hidden}] state gradient
        value layer/normed: bfloat16[{x}] gradient
        op layer/norm1 = aten.rms_norm(layer/x, layer/norm) -> layer/normed x{times}: b s d!, d! -> b s d! {{b: batch, s: sequence}}
        value layer/wq: bfloat16[{hidden}, {hidden}] state gradient
        value layer/wk: bfloat16[{kv * width}, {hidden}] state gradient
        value layer/wv: bfloat16[{kv * width}, {hidden}] state gradient
        value layer/q: bfloat16[{x}] gradient
        value layer/k: bfloat16[{batch}, {seq}, {kv * width}] gradient
        value layer/v: bfloat16[{batch}, {seq}, {kv * width}] gradient
        op layer/q = aten.linear(layer/normed, layer/wq) -> layer/q x{times}: b s k, n k -> b s n {{b: batch, s: sequence, n: heads}} options {both}
        op layer/k = aten.linear(layer/normed, layer/wk) -> layer/k x{times}: b s k, n k -> b s n {{b: batch, s: sequence, n: heads}} options {both}
        op layer/v = aten.linear(layer/normed, layer/wv) -> layer/v x{times}: b s k, n k -> b s n {{b: batch, s: sequence, n: heads}} options {both}
        value layer/qh: bfloat16[{batch}, {seq}, {heads}, {width}] gradient
        value layer/kh: bfloat16[{batch}, {seq}, {kv}, {width}] gradient
        value layer/vh: bfloat16[{batch}, {seq}, {kv}, {width}] gradient
        op layer/qh = aten.view(layer/q) -> layer/qh x{times}: b s (h d) -> b s h d {{b: batch}} options free=True
        op layer/kh = aten.view(layer/k) -> layer/kh x{times}: b s (h d) -> b s h d {{b: batch}} options free=True
        op layer/vh = aten.view(layer/v) -> layer/vh x{times}: b s (h d) -> b s h d {{b: batch}} options free=True
        value layer/mixed: bfloat16[{batch}, {seq}, {heads}, {width}] gradient
        op layer/attention = aten.scaled_dot_product_attention(layer/qh, layer/kh, layer/vh) -> layer/mixed x{times}: b q (g r) d!, b s! g d!, b s! g d! -> b q (g r) d! {{b: batch}} options whole=frozenset('sd') | frozenset('q'), flops_per_point=2.0
        value layer/flat: bfloat16[{x}] gradient
        op layer/flat = aten.view(layer/mixed) -> layer/flat x{times}: b s h d -> b s (h d) {{b: batch}} options free=True
        value layer/wo: bfloat16[{hidden}, {hidden}] state gradient
        value layer/o: bfloat16[{x}] gradient
        op layer/o = aten.linear(layer/flat, layer/wo) -> layer/o x{times}: b s k, n k -> b s n {{b: batch, s: sequence}} options {both}
        value layer/x1: bfloat16[{x}] gradient
        op layer/x1 = aten.add(layer/x, layer/o) -> layer/x1 x{times}: b s h, b s h -> b s h {{b: batch, s: sequence}} options sums=((0, 1),)
        value layer/norm2: bfloat16[{hidden}] state gradient
        value layer/normed2: bfloat16[{x}] gradient
        op layer/norm2 = aten.rms_norm(layer/x1, layer/norm2) -> layer/normed2 x{times}: b s d!, d! -> b s d! {{b: batch, s: sequence}}
        value layer/wg: bfloat16[{ffn}, {hidden}] state gradient
        value layer/wu: bfloat16[{ffn}, {hidden}] state gradient
        value layer/wd: bfloat16[{hidden}, {ffn}] state gradient
        value layer/g: bfloat16[{batch}, {seq}, {ffn}] gradient
        value layer/u: bfloat16[{batch}, {seq}, {ffn}] gradient
        value layer/s: bfloat16[{batch}, {seq}, {ffn}] gradient
        value layer/a: bfloat16[{batch}, {seq}, {ffn}] gradient
        value layer/d: bfloat16[{x}] gradient
        op layer/g = aten.linear(layer/normed2, layer/wg) -> layer/g x{times}: b s k, n k -> b s n {{b: batch, s: sequence, n: ffn}} options {both}
        op layer/u = aten.linear(layer/normed2, layer/wu) -> layer/u x{times}: b s k, n k -> b s n {{b: batch, s: sequence, n: ffn}} options {both}
        op layer/s = aten.silu(layer/g) -> layer/s x{times}: b s f -> b s f {{b: batch, s: sequence, f: ffn}}
        op layer/a = aten.mul(layer/s, layer/u) -> layer/a x{times}: b s f, b s f -> b s f {{b: batch, s: sequence, f: ffn}} options sums=((0,), (1,))
        op layer/d = aten.linear(layer/a, layer/wd) -> layer/d x{times}: b s k, n k -> b s n {{b: batch, s: sequence}} options {both}
        value layer/out: bfloat16[{x}] gradient interface=hidden
        op layer/out = aten.add(layer/x1, layer/d) -> layer/out x{times}: b s h, b s h -> b s h {{b: batch, s: sequence}} options sums=((0, 1),)
        value out/x: bfloat16[{x}] gradient interface=hidden
        value out/head: bfloat16[{vocab}, {hidden}] state gradient
        value out/logits: bfloat16[{batch}, {seq}, {vocab}] gradient
        value out/labels: int64[{batch}, {seq}] (batch sequence) source
        value out/loss: float32[] gradient
        op out/logits = aten.linear(out/x, out/head) -> out/logits x1: b s k, n k -> b s n {{b: batch, s: sequence}} options {both}
        op out/loss = autopar.cross_entropy(out/logits, out/labels) -> out/loss x1: b s v, b s -> {{b: batch, s: sequence}} options special=frozenset('bsv'), lowering='cross_entropy', reduced=frozenset('v'), flops_per_point=5.0
        """,
        outputs=["out/loss"],
        batch=batch,
    )


def random_problem(seed: int) -> Problem:
    """Two blocks of a few ops over [batch, width] values, with shared weights, residuals and a value handed on."""
    pick = random.Random(seed)
    batch, width = pick.choice([64, 512, 8192, 6]), pick.choice([64, 1024, 4096, 3])
    lines = [
        f"value a/x: bfloat16[{batch}, {width}] {pick.choice(['gradient', 'source', ''])}",
        f"value b/x: bfloat16[{batch}, {width}] gradient interface=carried",
    ]
    weights = [("a", "a/w0"), ("b", "b/w0")]
    share = " interface=w" if pick.random() < 0.5 else ""
    lines += [f"value {name}: bfloat16[{width}, {width}] state gradient{share}" for _, name in weights]
    for block, count in (("a", 2), ("b", 2)):
        made = [f"{block}/x"]
        for index in range(count):
            last = index == count - 1
            handed = " interface=carried" if last and block == "a" else ""
            name = f"{block}/v{index}"
            lines.append(f"value {name}: bfloat16[{batch}, {width}] gradient{handed}")
            kind = "linear" if index == 0 else pick.choice(["linear", "add", "mul", "silu", "norm", "opaque"])
            lines.append(_random_op(pick, kind, block, name, made))
            made.append(name)
    lines.append("value b/loss: float32[] gradient")
    lines.append("op b/loss = aten.sum(b/v1) -> b/loss x1: b c -> {b: batch}")
    times = {"a": pick.choice([1, 3]), "b": pick.choice([1, 3])}
    lines = [
        re.sub(r" x\d+:", f" x{times[line.split()[1][0]]}:", line) if line.startswith("op") else line
        for line in lines
    ]
    return parse_problem("\n".join(lines), outputs=["b/loss"], batch=batch)


def _random_op(pick: random.Random, kind: str, block: str, name: str, made: list[str]) -> str:
    one, other = pick.choice(made), pick.choice(made)
    if kind == "linear":
        return (
            f"op {name} = aten.linear({one}, {block}/w0) -> {name} x1: b k, n k -> b n {{b: batch}} "
            "options sums=((0,), (1,)), flops_per_point=2.0"
        )
    if kind == "add":
        return f"op {name} = aten.add({one}, {other}) -> {name} x1: b c, b c -> b c {{b: batch}} options sums=((0, 1),)"
    if kind == "mul":
        return f"op {name} = aten.mul({one}, {other}) -> {name} x1: b c, b c -> b c {{b: batch}} options sums=((0,), (1,))"
    if kind == "norm":
        return f"op {name} = aten.rms_norm({one}) -> {name} x1: b c! -> b c! {{b: batch}}"
    if kind == "silu":
        return f"op {name} = aten.silu({one}) -> {name} x1: b c -> b c {{b: batch}}"
    return f"op {name} = mylib.opaque({one}) -> {name} x1: no rule"
