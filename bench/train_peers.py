"""What `bench/train.py` compares: training steps by autopar and by torch's own parallelism.

Each contender is made from a model's name and a batch, and is `step(batch) -> loss`; the batch is the whole one of all
ranks, the loss that of the whole batch. All train with fused AdamW and clip to the global norm 1.

    ours/MESH   autopar, with the mesh given (`ours/fsdp=2,tp=2`)
    ddp         DistributedDataParallel, gradients as views of its buckets
    fsdp        fully_shard of every layer and of the model: ZeRO-3
    fsdp+tp     fully_shard over 2 ranks and tensor.parallel over 2, sequence-parallel norms, loss_parallel
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

import autopar
from bench.train_models import build, source_of

Batch = dict[str, Tensor]
Step = Callable[[Batch], float]
LR, MAX_NORM = 1e-4, 1.0


def make(contender: str, name: str, batch: Batch, precision: str) -> Step:
    """The training step of a contender, by its name above, of a model. `precision`: fp32 or bf16 (masters in fp32)."""
    if contender.startswith("ours/"):
        return _ours(contender.removeprefix("ours/"), name, batch, precision)
    return {"ddp": _ddp, "fsdp": _fsdp, "fsdp+tp": _fsdp_tp}[contender](build(name), precision)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, fused=True)


def _ours(mesh: str, name: str, batch: Batch, precision: str) -> Step:
    rows, length = batch["input_ids"].shape
    run = autopar.compile(
        source_of(name), f"cpu:{dist.get_world_size()}", mesh=mesh, batch=rows, seq=length, micro_batches=1,
        recompute="none", precision=precision,
    )  # fmt: skip
    torch.manual_seed(0)  # for the weights, where there are none yet
    run.start(optimizer=adamw, max_norm=MAX_NORM)
    return lambda whole: run.train_step(whole).loss


def _own_rows(batch: Batch, index: int, size: int) -> Batch:
    return {name: value.chunk(size)[index] for name, value in batch.items()}


def _mean(loss: Tensor, group: dist.ProcessGroup | None = None) -> float:
    """Of all ranks: every rank has equally many labels."""
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return float(loss) / dist.get_world_size(group)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _ddp(model: nn.Module, precision: str) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())

    def step(batch: Batch) -> float:
        mine = _own_rows(batch, dist.get_rank(), dist.get_world_size())
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = wrapped(**mine, use_cache=False).loss
        loss.backward()
        _update(model, optimizer)
        return _mean(loss)

    return step


def _sharded(model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _fsdp(model: nn.Module, precision: str) -> Step:
    _sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)), precision)
    optimizer = adamw(model.parameters())

    def step(batch: Batch) -> float:
        mine = _own_rows(batch, dist.get_rank(), dist.get_world_size())
        loss = model(**mine, use_cache=False).loss
        loss.backward()
        _update(model, optimizer)
        return _mean(loss)

    return step


def _fsdp_tp(model: nn.Module, precision: str) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    _tensor_parallel(model, mesh["tp"])
    _sharded(model, mesh["dp"], precision)
    optimizer = adamw(model.parameters())

    def step(batch: Batch) -> float:
        mine = _own_rows(batch, mesh["dp"].get_local_rank(), mesh["dp"].size())
        ids = mine["input_ids"]
        labels = pad(mine["labels"], (0, 1), value=-100)[:, 1:].flatten()
        positions = torch.arange(ids.shape[1]).unsqueeze(0)  # the model sees only its part of the sequence
        with loss_parallel():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), labels)
            loss.backward()
        _update(model, optimizer)
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return _mean(whole, mesh["dp"].get_group())

    return step


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    config = model.config
    divides = config.num_attention_heads % mesh.size() == 0 and config.num_key_value_heads % mesh.size() == 0
    for layer in model.model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "input_layernorm": SequenceParallel(),
                **(_split_attention() if divides else _whole_attention()),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def _split_attention() -> dict[str, Any]:
    return {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


def _whole_attention() -> dict[str, Any]:
    """Where the heads do not divide (SmolLM2 has 9): attention of the whole sequence on every rank."""
    return {
        "self_attn": PrepareModuleInputOutput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_input=True,
            output_layouts=(Replicate(), None),
            desired_output_layouts=(Shard(1), None),
        )
    }
