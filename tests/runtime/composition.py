"""What the composition tests run, in the simulator and on gloo: layouts of tiny models against the model on its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from autopar import api
from autopar.compiled import Compiled

# The planner leaves every rank of cp 128 tokens or more.
SHORT, LONG, BATCH = 16, 256, 8
COMMON = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": LONG,
}  # fmt: skip


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True))


def _mixtral() -> nn.Module:
    config = MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config)


def _deepseek() -> nn.Module:
    config = DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


MODELS = {"llama": _llama, "mixtral": _mixtral, "deepseek": _deepseek}


def model_and_batch(kind: str, *, long: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """A seeded model, and a batch whose labels are ignored unevenly: none of the last sequence counts."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    ids = torch.randint(0, 64, (BATCH, LONG if long else SHORT))
    labels = ids.clone()
    labels[0, :5] = -100
    labels[-1] = -100
    return model, {"input_ids": ids, "labels": labels}


def compile_layout(kind: str, layout: str, *, plan: Any = None) -> tuple[Compiled, dict[str, Tensor]]:
    """The model compiled for one layout, all words of it fixed."""
    long = "cp=" in layout
    model, batch = model_and_batch(kind, long=long)
    words = layout.split(",")
    sizes = dict(word.split("=") for word in words)
    ranks = 1
    for axis in ("dp", "tp", "cp", "pp"):
        ranks *= int(sizes.get(axis, 1))
    if plan is not None:
        return api.compile(model, None, batch, plan=plan), batch
    # What the search chooses itself, or would not choose on CPUs, is put into its plan.
    later = {name: sizes.pop(name) for name in ("cuts", "offload") if name in sizes}
    fixed = [f"{name}={value}" for name, value in sizes.items()]
    fixed += [f"{axis}=1" for axis in ("dp", "tp", "cp", "pp") if axis not in sizes]
    run = api.compile(model, f"cpu:{ranks}", batch, space="all", fix=fixed)
    if later:
        kept = [word for word in str(run.plan.layout).split(",") if word.partition("=")[0] not in later]
        text = ",".join([*kept, *(f"{name}={value}" for name, value in later.items())])
        plan = run.plan.model_copy(update={"layout": text})
        run = api.compile(model, None, batch, plan=plan)
    return run, batch


Expected = tuple[float, dict[str, Tensor], dict[str, Tensor]]


@cache
def expected(kind: str, long: bool) -> Expected:
    """Loss, gradients, and the parameters after one step of AdamW, of the model on its own."""
    model, batch = model_and_batch(kind, long=long)
    loss = model(**batch).loss
    loss.backward()
    parameters = dict(model.named_parameters())
    gradients = {
        name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None
    }
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer(list(model.parameters())).step()
    return float(loss.detach()), gradients, {name: value.detach() for name, value in parameters.items()}


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # Not the default eps: where a gradient is nothing but rounding, Adam would make a whole step of it.
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-3)


def errors(run: Compiled, batch: dict[str, Tensor], wanted: Expected) -> dict[str, float]:
    """On one rank: the largest relative error of loss, gradients and norm, and of the parameters after a step.

    `wanted`: made before ranks are simulated, which share a random generator.
    """
    run.start(optimizer=optimizer, max_norm=1.0)
    loss, gradients, after = wanted
    trainer = run.trainer
    found = {"loss": abs(trainer.gradients(batch) / loss - 1)}
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    found["norm"] = abs(float(trainer.gradient_norm()) / norm - 1)
    found["gradient"] = max(
        float((run.whole_gradient(name) - gradients[name]).norm())
        / float(gradients[name].norm() + 1e-3 * norm)
        for name in run.parameter_names
        if name in gradients
    )
    trainer.optimizer.zero_grad()
    run.train_step(batch)
    store = trainer.store
    found["parameter"] = max(
        float((store.whole_parameter(name, lambda entry: entry.parameter.detach()) - after[name]).abs().max())
        for name in run.parameter_names
    )
    found["names"] = float(len(run.parameter_names))
    return found
