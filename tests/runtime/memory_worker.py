"""On every rank: bytes of tensors that are alive in a training step, and where the peak is, against the plan's.

A case is `model/mesh/recompute/micro-batches/precision/variant`. What stays from step to step (parameters, buffers,
optimizer) is summed by storage; what comes and goes is every allocation and release of torch's CPU allocator in the
second step, as torch's profiler records them, those of C++ backward nodes included.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import autopar.api as api
from autopar import collectives
from autopar.plans import Plan
from autopar.runtime.groups import end_rank, leave, wait_for_all
from tests.runtime.equality_worker import remember_captures, shared_plan
from tests.runtime.processes import write_result

BATCH, SEQUENCE, VOCABULARY, HIDDEN, LAYERS = 16, 64, 2048, 128, 4
# Where a thread of gloo's was late all the same, a step seems to take more: of a few steps, the least counts.
STEPS = 2
# Of a plan's memory, what is not tensors: what a GPU's allocator and libraries take.
NOT_TENSORS = ("fragmentation", "reserved")


def small(kind: str) -> nn.Module:
    """A model of which weights, activations and logits all are a good part."""
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=HIDDEN, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=SEQUENCE,
                bos_token_id=0, eos_token_id=0, use_cache=False,
            )
        ).eval()  # fmt: skip
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False,
        )
    ).eval()  # fmt: skip


def storage_bytes(tensors: list[Tensor]) -> int:
    """Each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def start(case: str) -> tuple[Plan, api.Compiled, dict[str, Tensor]]:
    kind, mesh, recompute, micro, precision, variant = case.split("/")
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    devices = 1
    for part in mesh.split(","):
        devices *= int(part.split("=")[1])
    fix = {"planned": (), "megatron": ("heads=tp", "ffn=tp", "vocab=tp"),
           "sequence": ("heads=tp", "ffn=tp", "vocab=tp", "sequence=tp")}[variant]  # fmt: skip
    model = small(kind)
    plan = shared_plan(
        model, f"cpu:{devices}", example_inputs=batch, mesh=mesh, fix=fix, recompute=recompute,
        micro_batches=int(micro), precision=precision,
    )  # fmt: skip
    run = api.compile(model, plan=plan, example_inputs=batch).start(timeout_s=120)
    return plan, run, batch


def wait_for_gloo() -> None:
    """After each collective, give gloo's threads time to let go of its tensors. They may be the last to hold one, and
    the profiler does not see what other threads release."""

    def patient(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            time.sleep(0.001)
            return result

        return called

    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        setattr(dist, name, patient(getattr(dist, name)))
    functional = collectives.c10d
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    collectives.c10d = SimpleNamespace(
        wait_tensor=patient(functional.wait_tensor), **{name: getattr(functional, name) for name in names}
    )


def measure(case: str) -> dict[str, Any]:
    """Predicted and measured bytes: `stays`, and `peak` with the phase and the op it is reached in."""
    plan, run, batch = start(case)
    run.train_step(batch)  # the optimizer's state comes into being
    store = run.trainer.model.store
    optimizer = [value for state in run.optimizer.state.values() for value in state.values()]
    stays = storage_bytes([*store.parameters.values(), *store.buffers.values(), *optimizer])
    found = [phases(profiled(lambda: run.train_step(batch))) for _ in range(STEPS)]
    kinds = {kind: size for kind, size in plan.predicted.memory_bytes.items() if kind not in NOT_TENSORS}
    return {
        "kinds": kinds,
        "predicted": sum(kinds.values()),
        "stays": stays,
        "phases": {phase: stays + min(step[phase] for step in found) for phase in found[0]},
    }


def profiled(step: Callable[[], object]) -> list[dict[str, Any]]:
    """The events of torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return trace


def phases(trace: list[dict[str, Any]]) -> dict[str, int]:
    """Most bytes alive beyond those at the start, in forward, backward and the optimizer's step.

    Without the copies that gloo makes inside of a collective (NCCL makes none): its threads let them go whenever they
    get to it.
    """
    most: dict[str, int] = defaultdict(int)
    phase, live, gloo_until = "forward", 0, 0.0
    alive: dict[int, int] = {}  # address -> bytes that count
    for event in sorted((event for event in trace if "ts" in event), key=lambda event: event["ts"]):
        name = str(event.get("name"))
        if name == "[memory]":
            address, size = event["args"]["Addr"], event["args"]["Bytes"]
            live -= alive.pop(address, 0)  # where it is given out again, a thread of gloo's had let it go
            if size > 0 and event["ts"] > gloo_until:
                alive[address] = size
                live += size
                most[phase] = max(most[phase], live)
        elif name.startswith("c10d::") and "dur" in event:
            gloo_until = event["ts"] + event["dur"]
        elif name.startswith("autograd::engine::evaluate_function"):
            phase = "backward"
        elif name.startswith("Optimizer.step"):
            phase = "optimizer"
    return dict(most)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    remember_captures()
    wait_for_gloo()
    results = {}
    for case in sys.argv[1:]:
        results[case] = measure(case)
        print(case, results[case], flush=True)
    write_result(results)
    wait_for_all()
    leave()
    end_rank()
