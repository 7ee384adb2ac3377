"""On every rank: loss and gradients of tiny models under each given mesh, against the same model unsharded here."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar import api, prepared
from autopar.plans import Plan
from autopar.runtime.groups import end_rank, leave, wait_for_all
from tests.runtime.processes import write_result
from tests.tiny import tiny


def fixes(kind: str, variant: str) -> tuple[str, ...]:
    if variant == "sequence":  # attention too is split by the sequence: of the queries, against all keys
        return ("ffn=tp", "vocab=tp") if kind == "vit" else ("sequence=tp", "ffn=tp", "vocab=tp")
    if variant != "megatron":
        return ()
    # ViT has 16 patches and a class token: its sequence of 17 does not divide.
    return (
        ("heads=tp", "ffn=tp", "vocab=tp")
        if kind == "vit"
        else ("heads=tp", "ffn=tp", "vocab=tp", "sequence=tp")
    )


def shared_plan(*arguments: Any, **options: Any) -> Plan:
    """Rank 0 plans, for all."""
    text = [api.plan(*arguments, **options).to_json() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(text)
    assert text[0] is not None
    return Plan.from_json(text[0])


def remember_captures() -> None:
    """The same model in the same shapes is captured once, however many meshes it is run on."""
    capture = prepared.capture
    known: dict[Any, Any] = {}

    @functools.wraps(capture)
    def cached(model: torch.nn.Module, inputs: dict[str, Any], **options: Any) -> Any:
        shapes = tuple((name, tuple(value.shape)) for name, value in inputs.items())
        key = (type(model), shapes, tuple(sorted(options.items(), key=str)))
        if key not in known:
            known[key] = capture(model, inputs, **options)
        return known[key]

    prepared.capture = cached


class Case:
    """A tiny model, its unsharded loss and gradients, and the plan of one case; `plan` is how plans are made."""

    def __init__(self, kind: str, mesh: str, variant: str, plan: Callable[..., Plan]) -> None:
        model, self.batch = tiny(kind)
        reference = model(**self.batch).loss
        reference.backward()
        self.loss = float(reference.detach())
        self.expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        options: dict[str, dict[str, Any]] = {
            "recompute": {"recompute": "full"},
            "micro": {"micro_batches": 2},
        }
        self.devices = math.prod(int(part.split("=")[1]) for part in mesh.split(","))
        made = plan(
            model,
            f"cpu:{self.devices}",
            example_inputs=self.batch,
            mesh=mesh,
            fix=fixes(kind, variant),
            **options.get(variant, {}),
        )
        self.run = api.compile(model, plan=made, example_inputs=self.batch, compiled=variant == "compile")

    def errors(self, run: api.Compiled) -> dict[str, float]:
        """On a rank: errors of the loss relative, the worst gradient relative to its norm, the norm relative."""
        run.start(timeout_s=120)
        loss = run.trainer.gradients(self.batch)
        gradients = [gradient for gradient in self.expected.values() if gradient is not None]
        largest = max(float(gradient.norm()) for gradient in gradients)
        worst, which = 0.0, ""
        for name, gradient in self.expected.items():
            if name not in run.parameter_names:
                assert gradient is None, f"{name} has a gradient and is not in the program"
                continue
            found = run.whole_gradient(name)
            # A gradient that is zero but for rounding (of a key's bias: softmax does not see it) has no relative error
            # of its own; measure it against the largest.
            scale = max(float(gradient.norm()), 1e-4 * largest) if gradient is not None else largest
            error = float((found - (0.0 if gradient is None else gradient)).norm()) / scale
            if not error <= worst:
                worst, which = error, name
        norm = float(run.trainer.gradient_norm())
        expected_norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
        return {
            "loss": abs(loss / self.loss - 1),
            "gradient": worst,
            "norm": abs(norm / expected_norm - 1),
            "which": which,  # type: ignore[dict-item]
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    remember_captures()
    results = {}
    for case in sys.argv[1:]:
        kind, mesh, variant = case.split("/")
        made = Case(kind, mesh, variant, shared_plan)
        results[case] = made.errors(made.run)
        print(case, results[case], flush=True)
    write_result(results)
    wait_for_all()
    leave()
    end_rank()
