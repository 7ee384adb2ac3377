"""Recurrent layers and their cells: the batch splits; time, whose steps follow each other, and the features, which
all of a step needs, are whole.

    lstm(x, [h, c], [weights], ...), batch first
        b t! i!, l! b h!, l! b h!, g! i!, g! h!, g!, g! -> b t! o!, l! b h!, l! b h!
    lstm_cell(x, [h, c], w, u, ...)    b i!, b h!, b h!, g! i!, g! h!, g!, g! -> b h!, b h!
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from autopar.program import TensorInfo
from autopar.rules.call import OpCall, RuleFunction, text_of, tokens
from autopar.rules.rule import Rule

LOGICAL = {"b": "batch"}


def layers(call: OpCall, *, states: int) -> Rule | None:
    """lstm, gru, rnn_tanh, rnn_relu(x, state(s), weights, has_biases, layers, dropout, train, both ways, batch first):
    not the forms for packed sequences, whose batch differs from step to step."""
    x = call.shapes[0]
    if len(call.args) != 9 or isinstance(call.args[3], (TensorInfo, list, tuple)) or len(x) != 3:
        return None
    dropout, train, first = call.args[5], call.args[6], bool(call.args[8])
    if dropout and train:
        return None
    batch = (x[0],) if first else (x[1],)
    (b,) = tokens(batch, ["b"])
    time = [b, "t!"] if first else ["t!", b]
    kept = [["l!", b, "h!"]] * states
    weights = [
        [f"w{index}d{dim}!" for dim in range(len(shape))]
        for index, shape in enumerate(call.shapes[1 + states :])
    ]
    if any(shape[2] != call.shapes[1][2] for shape in call.shapes[1 : 1 + states]):
        return None  # a projection
    text = text_of([[*time, "i!"], *kept, *weights], [[*time, "o!"], *kept])
    return call.parse(text, flops_per_point=0.0, logical=LOGICAL)


def cell(call: OpCall, *, states: int) -> Rule | None:
    """lstm_cell(x, [h, c], weights), gru_cell(x, h, weights), rnn_tanh_cell, rnn_relu_cell."""
    if len(call.shapes[0]) != 2:
        return None
    (b,) = tokens(call.shapes[0][:1], ["b"])
    kept = [[b, "h!"]] * states
    weights = [
        [f"w{index}d{dim}!" for dim in range(len(shape))]
        for index, shape in enumerate(call.shapes[1 + states :])
    ]
    return call.parse(text_of([[b, "i!"], *kept, *weights], kept), logical=LOGICAL)


RULES: Mapping[str, RuleFunction] = {
    "aten.lstm": partial(layers, states=2),
    **{f"aten.{name}": partial(layers, states=1) for name in ("gru", "rnn_tanh", "rnn_relu")},
    "aten.lstm_cell": partial(cell, states=2),
    **{f"aten.{name}_cell": partial(cell, states=1) for name in ("gru", "rnn_tanh", "rnn_relu")},
}
