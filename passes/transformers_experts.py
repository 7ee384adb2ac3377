"""Experts for capture of Transformers models: one op per layer of experts, whatever way the model writes them.

In:  a (copied) Transformers model.
Out: its modules with experts call `autopar.experts` (see `autopar.expert_functions`), with gate and up as separate
     matrices [e, f, d] cut from where the model packs them. Three ways of writing experts are known:
     - stacked matrices behind `forward(hidden_states, top_k_index, top_k_weights)`: the protocol of Transformers'
       `use_experts_implementation` (transformers/integrations/moe.py), whatever implementation the config names;
     - Transformers' modules of a name in `WRITTEN_OUT`, whose forward looks at the values of tensors;
     - everything else is left as it is: dense mixtures export as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.expert_functions import ONE_OP
from autopar.passes.expert_texts import ExpertText, expert_text
from autopar.passes.fold import signature

Texts = Callable[[nn.Module, str, Callable[[Tensor], Tensor], Tensor, int, str, int], ExpertText]


def use_one_op(model: nn.Module) -> None:
    """Give every module with experts a forward that calls the one op (changes the modules, which are the copy's)."""
    known: dict[Any, ExpertText] = {}

    def texts(
        owner: nn.Module,
        what: str,
        function: Callable[[Tensor], Tensor],
        like: Tensor,
        width: int,
        name: str,
        first: int,
    ) -> ExpertText:
        """Layers of a kind share their texts: tracing one takes half a second."""
        key = (signature(owner, -1), what, width, name, first, like.dtype)
        if key not in known:
            known[key] = expert_text(owner, function, width, like.dtype, name, first)
        return known[key]

    for module in list(model.modules()):
        if not type(module).__module__.startswith(("transformers.", "transformers_modules.")):
            continue
        adapt = WRITTEN_OUT.get(type(module).__name__) or (stacked if _is_stacked(module) else None)
        if adapt is not None and next(module.parameters(), None) is not None:
            adapt(module, texts)


# ---- stacked matrices ----------------------------------------------------------------------------------------------


def _is_stacked(module: nn.Module) -> bool:
    """Whether a module's class is decorated with `use_experts_implementation`, which leaves these attributes."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))


def _packed(module: nn.Module) -> Any:
    return (
        getattr(module, "gate_up_proj", None)
        if hasattr(module, "gate_up_proj")
        else getattr(module, "up_proj", None)
    )


def stacked(module: Any, texts: Texts) -> None:
    """`use_experts_implementation`'s protocol: gate_up_proj [e, 2f, d] (or up_proj), down_proj [e, d, f], transposed or
    not, halves or in turn, with biases or not, with a norm after each expert or not."""
    packed, down = _packed(module), module.down_proj
    gated = hasattr(module, "gate_up_proj")
    transposed = bool(getattr(module, "is_transposed", False))
    biased = bool(getattr(module, "has_bias", False))
    width = packed.shape[2 if transposed else 1]

    def between(slots: Tensor) -> Tensor:
        if not gated:
            return module.act_fn(slots)  # type: ignore[no-any-return]
        if hasattr(type(module), "_apply_gate"):
            return module._apply_gate(slots)  # type: ignore[no-any-return]
        gate, up = slots.chunk(2, dim=-1)
        return module.act_fn(gate) * up  # type: ignore[no-any-return]

    inner = texts(module, "inner", between, packed, width, "up", 0)
    outer = ExpertText("", ())
    if getattr(module, "has_post_expert_norm", False):
        outer = texts(
            module, "outer", module.post_expert_norm, down, module.hidden_dim, "out", len(inner.extras)
        )
    known_experts = down.shape[0]

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        packed, down = _packed(module), module.down_proj
        packed_bias = None
        if biased:
            packed_bias = module.gate_up_proj_bias if gated else module.up_proj_bias
        gate, up = _halves(packed, 2 if transposed else 1, inner.layout)
        if (
            packed.shape[0] > known_experts
        ):  # further rows for experts that do nothing; of each half, so that these are
            gate, up = _first(gate, known_experts), _first(up, known_experts)  # pieces of the parameter
        gate_bias, up_bias = _halves(packed_bias, 1, inner.layout)
        if transposed:
            gate, up, down = _turned(gate), _turned(up), _turned(down)
        result = ONE_OP(
            hidden_states, top_k_index, top_k_weights, gate, up, down, gate_bias, up_bias,
            module.down_proj_bias if biased else None,
            [module.get_parameter(path) for path in (*inner.extras, *outer.extras)], inner.text, outer.text,
        )  # fmt: skip
        idle = getattr(module, "zero_expert_num", 0)
        if idle:  # slots beyond the experts with matrices hand their token on as it is
            kept = torch.where(top_k_index >= known_experts, top_k_weights, 0.0).sum(-1, keepdim=True)
            result = result + (hidden_states * kept).to(result.dtype)
        return result  # type: ignore[no-any-return]

    module.forward = forward


def _halves(packed: Tensor | None, dim: int, layout: str) -> tuple[Tensor | None, Tensor | None]:
    """(gate, up) of a packed matrix; (None, all of it) where the text does not tell them apart."""
    if packed is None or not layout:
        return None, packed
    half = packed.shape[dim] // 2
    if layout == "halves":
        return packed.narrow(dim, 0, half), packed.narrow(dim, half, half)
    pairs = packed.unflatten(dim, (half, 2))
    return pairs.select(dim + 1, 0), pairs.select(dim + 1, 1)


def _first(weight: Tensor | None, count: int) -> Any:
    return None if weight is None else weight.narrow(0, 0, count)


def _turned(weight: Tensor | None) -> Any:
    return None if weight is None else weight.transpose(1, 2)


# ---- experts that are written out ----------------------------------------------------------------------------------


def _product(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(slots: Tensor) -> Tensor:
        gate, up = slots.chunk(2, dim=-1)
        return act(gate) * up

    return function


def _call(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor | None,
    text: ExpertText,
    biases: Sequence[Tensor | None] = (None, None, None),
) -> Tensor:
    result: Tensor = ONE_OP(x, index, weights, gate, up, down, *biases, [], text.text, "")
    return result


def _dbrx(module: Any, texts: Texts) -> None:
    """Matrices [(e f), d], of down too."""
    glu = module.mlp
    text = texts(glu, "inner", _product(glu.activation_fn), glu.w1, 2 * module.ffn_hidden_size, "up", 0)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
        w1, v1, w2 = (weight.view(shape) for weight in (glu.w1, glu.v1, glu.w2))
        rows = hidden_states.reshape(-1, module.hidden_size)
        made = _call(rows, top_k_index, top_k_weights, w1, v1, w2.transpose(1, 2), text)
        return made.view(hidden_states.shape[0], -1, module.hidden_size)

    module.forward = forward


def _llama4(module: Any, texts: Texts) -> None:
    """Every expert runs every token, scaled by a score that is 0 for all but the best few: the others add nothing,
    to the result or to a gradient, for experts have no bias. The score scales what goes in."""
    inside = module.experts
    width = inside.gate_up_proj.shape[2]
    text = texts(inside, "inner", _product(inside.act_fn), inside.gate_up_proj, width, "up", 0)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, module.hidden_dim)
        scores, logits = module.router(hidden_states)
        index = torch.topk(logits, module.top_k, dim=1)[1]
        chosen = scores.gather(1, index)
        gate, up = _halves(inside.gate_up_proj, 2, text.layout)
        down = inside.down_proj.transpose(1, 2)
        out = module.shared_expert(hidden_states)
        for slot in range(module.top_k):
            rows = hidden_states * chosen[:, slot : slot + 1]
            at = index[:, slot : slot + 1]
            out = out + _call(rows, at, torch.ones_like(rows[:, :1]), _turned(gate), _turned(up), down, text)
        return out, logits

    module.forward = forward


def _jetmoe_gating(module: Any, texts: Texts) -> None:
    def forward(hidden_states: Tensor) -> tuple[Any, ...]:
        logits = module.layer(hidden_states).float()
        best, index = logits.topk(module.top_k, dim=1)
        gates = torch.softmax(best, dim=1).type_as(hidden_states)
        return index, None, gates, None, logits

    module.forward = forward


def _jetmoe(module: Any, texts: Texts) -> None:
    packed = module.input_linear.weight
    text = texts(module, "inner", _product(module.activation), packed, packed.shape[1], "up", 0)

    def forward(layer_input: Tensor) -> Tensor:
        rows = layer_input.reshape(-1, layer_input.shape[-1])
        index, _, gates, _, _ = module.router(rows)
        gate, up = _halves(module.input_linear.weight, 1, text.layout)
        assert up is not None
        made = _call(rows, index, gates, gate, up, module.output_linear.weight, text)
        bias: Tensor = module.bias
        return made.view(layer_input.shape) + bias

    module.forward = forward


def _jetmoe_attention(module: Any, texts: Texts) -> None:
    """Experts are pairs of a query and an output projection, with attention between: one matrix per slot each."""
    one = ExpertText("", ())

    def each(rows: Tensor, index: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
        return _call(rows, index, weights, None, matrices, None, one)

    def map_input(layer_input: Tensor) -> tuple[Tensor, Tensor, Any]:
        batch, length, size = layer_input.shape
        rows = layer_input.reshape(-1, size)
        index, _, gates, _, logits = module.router(rows)
        matrices = module.input_linear.weight
        ones = torch.ones_like(gates[:, :1])
        slots = [each(rows, index[:, k : k + 1], ones, matrices) for k in range(module.top_k)]
        return torch.stack(slots, 1).view(batch, length, module.top_k, -1), logits, (index, gates)

    def reduce_output(layer_input: Tensor, topology: Any) -> Tensor:
        index, gates = topology
        batch, length, share, size = layer_input.shape
        slots = layer_input.reshape(batch * length, share, size)
        out = sum(
            each(slots[:, k], index[:, k : k + 1], gates[:, k : k + 1], module.output_linear.weight)
            for k in range(share)
        )
        assert isinstance(out, Tensor)
        bias: Tensor = module.bias
        return out.view(batch, length, -1) + bias

    module.map, module.reduce = map_input, reduce_output


def _casting_router(module: Any, texts: Texts) -> None:
    """Its forward casts the classifier's parameters in place, which a traced module cannot: here the classifier casts
    them each time."""
    classifier = module.classifier

    def to(dtype: torch.dtype) -> nn.Module:
        def forward(rows: Tensor) -> Tensor:
            bias = None if classifier.bias is None else classifier.bias.to(dtype)
            return nn.functional.linear(rows, classifier.weight.to(dtype), bias)

        classifier.forward = forward
        return classifier  # type: ignore[no-any-return]

    classifier.to = to


def _stack(layers: Sequence[nn.Module], name: str) -> Any:
    parameters: list[Tensor] = [layer.get_parameter(name) for layer in layers]
    return torch.stack(parameters)


def _switch(module: Any, texts: Texts) -> None:
    """A mask of at most one expert per token; tokens beyond an expert's capacity have none."""
    layers = list(module.values())
    width, like = layers[0].wi.weight.shape[0], layers[0].wi.weight
    text = texts(layers[0], "inner", layers[0].act, like, width, "up", 0)

    def forward(hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
        chosen = selected_experts.argmax(-1)
        index = torch.where(selected_experts.sum(-1) > 0, chosen, len(layers))
        up, down = _stack(layers, "wi.weight"), _stack(layers, "wo.weight")
        return _call(hidden_states, index, routing_weights, None, up, down, text)

    module.forward = forward


def _nllb(module: Any, texts: Texts) -> None:
    """Transformers reads the 0s and 1s of the mask of first choices as the numbers of experts, one slot for each
    expert: slot j of a token goes to expert mask[j] with weight probs[j]. So it is here, where the weight is not 0."""
    layers = list(module.values())
    layers = [layer for layer in layers if hasattr(layer, "fc1")]
    width, like = layers[0].fc1.weight.shape[0], layers[0].fc1.weight
    text = texts(layers[0], "inner", layers[0].act, like, width, "up", 0)

    def forward(hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
        index = torch.where(router_probs != 0, router_mask, len(layers))
        weights = (
            router_probs * (1 - module.moe_token_dropout) if module.moe_token_dropout > 0 else router_probs
        )
        names = ("fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")
        up, down, up_bias, down_bias = (_stack(layers, name) for name in names)
        return _call(hidden_states, index, weights, None, up, down, text, (None, up_bias, down_bias))

    module.forward = forward


WRITTEN_OUT: Mapping[str, Callable[[Any, Texts], None]] = {
    "DbrxExperts": _dbrx,
    "LongcatFlashExperts": stacked,
    "Step3p7Experts": stacked,
    "Llama4TextMoe": _llama4,
    "JetMoeTopKGating": _jetmoe_gating,
    "JetMoeMoE": _jetmoe,
    "JetMoeMoA": _jetmoe_attention,
    "SwitchTransformersTop1Router": _casting_router,
    "NllbMoeTop2Router": _casting_router,
    "SwitchTransformersExperts": _switch,
    "NllbMoeExperts": _nllb,
}
