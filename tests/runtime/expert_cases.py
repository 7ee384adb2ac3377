"""Layers of experts on simulated ranks, with every choice of the experts' op, against Transformers' eager experts.

The loads of the routers are random, skewed (one expert gets most tokens) or all on one expert, so that experts without
a token and ranks that receive nothing are among the cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.candidates import candidates
from autopar.passes.capture import capture
from autopar.passes.lower import RankProgram, lower
from autopar.passes.placement import solve
from autopar.passes.problem import build_problem
from autopar.problem import Choice, Problem
from autopar.program import Program
from autopar.runtime.groups import join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.simulate import simulate
from autopar.runtime.store import ParameterStore
from autopar.runtime.trainer import Trainer

BATCH, SEQUENCE, VOCABULARY = 4, 8, 64
EXPERTS = "autopar.experts"

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}


def _mixtral(**options: Any) -> nn.Module:
    import transformers

    config = transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2, **options)
    return transformers.MixtralForCausalLM(config)


def _mixtral_auxiliary() -> nn.Module:
    """With the load-balancing loss, a mean over the tokens of all layers."""
    return _mixtral(output_router_logits=True, router_aux_loss_coef=0.5)


def _gpt_oss() -> nn.Module:
    """Biases, gate and up in turn, transposed matrices."""
    import transformers

    config = transformers.GptOssConfig(
        **_SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    )
    return transformers.GptOssForCausalLM(config)


def _deepseek_v3() -> nn.Module:
    """A sigmoid router with a bias that picks groups first, and a shared expert beside the routed ones."""
    import transformers

    config = transformers.DeepseekV3Config(
        **{**_SIZES, "num_key_value_heads": 4, "num_hidden_layers": 3},
        moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
        first_k_dense_replace=1, n_shared_experts=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, routed_scaling_factor=1.5,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def _qwen2_moe() -> nn.Module:
    """A shared expert with a gate of its own."""
    import transformers

    config = transformers.Qwen2MoeConfig(
        **_SIZES, moe_intermediate_size=12, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


def _nemotron_h() -> nn.Module:
    """No gate."""
    import transformers

    config = transformers.NemotronHConfig(
        **{**_SIZES, "head_dim": 8}, moe_intermediate_size=12, n_routed_experts=4, num_experts_per_tok=2,
        layers_block_type=["moe", "attention"], moe_shared_expert_intermediate_size=16, n_group=1, topk_group=1,
    )  # fmt: skip
    return transformers.NemotronHForCausalLM(config)


def _dbrx() -> nn.Module:
    import transformers

    config = transformers.DbrxConfig(
        d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=VOCABULARY, use_cache=False,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    return transformers.DbrxForCausalLM(config)


def _llama4() -> nn.Module:
    import transformers

    config = transformers.Llama4TextConfig(
        **_SIZES, head_dim=8, intermediate_size_mlp=24, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.Llama4ForCausalLM(config)


def _jetmoe() -> nn.Module:
    import transformers

    sizes = {key: value for key, value in _SIZES.items() if key != "num_attention_heads"}
    config = transformers.JetMoeConfig(
        **sizes,
        kv_channels=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        aux_loss_coef=0.5,
    )
    return transformers.JetMoeForCausalLM(config)


def _exact_routers(model: nn.Module) -> nn.Module:
    """Routers in double precision: their configs name no such dtype, and their forward would cast their parameters."""
    for module in model.modules():
        if hasattr(module, "classifier") and isinstance(getattr(module, "dtype", None), torch.dtype):
            module.dtype = torch.float64
    return model


def _switch() -> nn.Module:
    """One expert of a list per token, or none beyond its capacity."""
    import transformers

    config = transformers.SwitchTransformersConfig(
        d_model=32, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=VOCABULARY,
        num_experts=4, expert_capacity=3,  num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        decoder_start_token_id=0, use_cache=False, pad_token_id=VOCABULARY - 1,
    )  # fmt: skip
    return _exact_routers(transformers.SwitchTransformersForConditionalGeneration(config))


def _nllb() -> nn.Module:
    import transformers

    config = transformers.NllbMoeConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=VOCABULARY, num_experts=4, expert_capacity=6,
        encoder_sparse_step=1, decoder_sparse_step=1, decoder_start_token_id=0, use_cache=False,
        pad_token_id=1, max_position_embeddings=32, moe_token_dropout=0.2,
    )  # fmt: skip
    return _exact_routers(transformers.NllbMoeForConditionalGeneration(config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": _mixtral,
    "mixtral_auxiliary": _mixtral_auxiliary,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "qwen2_moe": _qwen2_moe,
    "nemotron_h": _nemotron_h,
    "dbrx": _dbrx,
    "llama4": _llama4,
    "jetmoe": _jetmoe,
    "switch": _switch,
    "nllb": _nllb,
}


def build(name: str, load: str = "random") -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model in double precision whose experts are Transformers' own loop, and a batch with unevenly many
    ignored labels."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    if hasattr(model, "set_experts_implementation") and name not in (
        "dbrx",
        "llama4",
        "jetmoe",
        "switch",
        "nllb",
    ):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
            if load != "random" and parameter.dim() == 2 and "embed" in parameter_name:
                parameter[:, 0] = 6.0  # one coordinate in which all tokens are alike: it decides the experts
            if load != "random" and _routes(parameter_name, parameter):
                most = 1.0 if load == "skewed" else 40.0
                parameter[:, 0] = torch.linspace(most, 0.0, parameter.shape[0])
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    labels = ids.clone()
    labels[0, :5] = -100
    labels[3, :6] = -100
    batch = {"input_ids": ids, "labels": labels}
    if name == "switch":  # traced, it needs the mask that it makes for itself otherwise
        batch["attention_mask"] = torch.ones(BATCH, SEQUENCE)
    return model, batch


def _routes(name: str, parameter: Tensor) -> bool:
    names = ("gate.weight", "router.weight", "router.layer.weight")
    return parameter.dim() == 2 and name.endswith(names) and parameter.shape[0] in (4, 8)


@dataclass(frozen=True)
class Step:
    loss: float
    gradients: Mapping[str, Tensor]


@cache
def expected(name: str, load: str) -> Step:
    model, batch = build(name, load)
    loss = model(**batch).loss
    loss.backward()
    return Step(
        float(loss.detach()),
        {key: value.grad for key, value in model.named_parameters() if value.grad is not None},
    )


@cache
def captured(name: str) -> tuple[Program, Problem]:
    model, batch = build(name)
    program, axes = name_axes(capture(model, batch, name=name))
    return program, build_problem(program, axes)


def choices(name: str, mesh: Mesh) -> list[Choice]:
    """Every choice of the (first) experts op on a mesh."""
    problem = captured(name)[1]
    op = next(op for op in problem.ops if op.kind == EXPERTS)
    return [candidate.as_choice for candidate in candidates(op, problem, mesh)]


def _prepared(name: str, mesh: Mesh, choice: Choice | None) -> RankProgram:
    program, problem = captured(name)
    if choice is not None:
        fixed = {op.name: choice for op in problem.ops if op.kind == EXPERTS}
        problem = replace(problem, fixed=fixed)
    cluster = load_cluster(f"cpu:{mesh.device_count}")
    solution = solve(problem, mesh, Prices.of(cluster, mesh, "fp32", problem))
    return lower(program, problem, solution, mesh)


def _run(built: tuple[nn.Module, dict[str, Tensor]], mesh: Mesh, ranked: RankProgram) -> Step:
    """One step's gradients, on one rank."""
    model, batch = built
    state = {**ranked.constants, **dict(model.named_buffers(remove_duplicate=False))}
    state.update(model.named_parameters(remove_duplicate=False))
    groups = join_mesh(mesh)
    store = ParameterStore(ranked, groups, {key: value.detach() for key, value in state.items()})
    trainer = Trainer(RankModel(ranked, groups, store), torch.optim.SGD(store.parameters.values()))
    loss = trainer.gradients(batch)
    return Step(loss, {key: store.whole_parameter(key, _gradient) for key in store.parts})


def step_of_rank(name: str, mesh: Mesh, choice: Choice | None, load: str) -> Step:
    """One step's gradients on this process, one of several; all experts ops take `choice`."""
    return _run(build(name, load), mesh, _prepared(name, mesh, choice))


def sharded(name: str, mesh: Mesh, choice: Choice | None, load: str = "random") -> Step:
    """One step's gradients on simulated ranks; all experts ops take `choice`."""
    ranked = _prepared(name, mesh, choice)
    built = build(name, load)  # not in the ranks: they share torch's random generator
    return simulate(mesh.device_count, lambda _: _run(built, mesh, ranked))[0]


def _gradient(entry: Any) -> Tensor:
    found = entry.parameter.grad
    return torch.zeros_like(entry.parameter) if found is None else found


def compare(name: str, mesh_text: str, choice: Choice | None, load: str = "random") -> None:
    """Raises AssertionError where ranks and the unsharded model with eager experts differ."""
    found = sharded(name, Mesh.parse(mesh_text), choice, load)
    wanted = expected(name, load)
    # losses, rotary tables and router scores are float32 in some models
    assert abs(found.loss / wanted.loss - 1) < 1e-6, (found.loss, wanted.loss)
    largest = max(float(gradient.norm()) for gradient in wanted.gradients.values())
    for key, gradient in wanted.gradients.items():
        if key not in found.gradients:
            assert float(gradient.norm()) == 0.0, f"{key} is not in the program"
            continue
        error = float((found.gradients[key] - gradient).norm())
        assert error <= 1e-5 * max(float(gradient.norm()), 1e-3 * largest), (
            key,
            error,
            float(gradient.norm()),
        )
