"""What planning costs: CPU seconds and peak memory of a cold process, at two depths of one model.

    python bench/planning.py

Plans llama-3.1-8b cut or stretched to 32 and 126 layers on h100:32x8, batch 512, sequence 8192, each in a process of
its own. Imports are timed apart. Aims: under 5 s beyond imports, under 1.5 GB, and 126 layers within 1.2 of 32.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

MODEL, CLUSTER, BATCH, SEQ = "llama-3.1-8b", "h100:32x8", 512, 8192
LAYERS = (32, 126)


def measure(layers: int) -> dict[str, float | str]:
    """Plan once in this process."""
    import copy

    from autopar.models.source import find_model

    try:
        from autopar.api import plan as plan_model
    except ImportError:
        plan_model = None  # type: ignore[assignment]
    import transformers.models.llama.modeling_llama

    from autopar.cluster import load_cluster
    from autopar.passes import axes, capture, problem, search

    assert transformers.models.llama.modeling_llama
    imports_s, imports_bytes = time.process_time(), peak_bytes()
    wall = time.perf_counter()
    config = copy.deepcopy(find_model(MODEL).config)
    assert config is not None
    config.num_hidden_layers = layers  # type: ignore[attr-defined]
    if plan_model is not None:
        plan = plan_model(config, CLUSTER, batch=BATCH, seq=SEQ)
    else:
        import torch

        source = find_model(config)  # type: ignore[arg-type]
        with torch.device("meta"):
            model, inputs = source.build(), source.example_inputs(4, SEQ)
        program, named = axes.name_axes(capture.capture(model, inputs))
        found = problem.build_problem(program, named)
        plan = search.search(program, found, load_cluster(CLUSTER), batch=BATCH, seq=SEQ, precision="bf16")
    return {
        "layers": layers,
        "cpu_s": time.process_time() - imports_s,
        "wall_s": time.perf_counter() - wall,
        "imports_s": imports_s,
        "peak_gb": peak_bytes() / 1e9,
        "imports_gb": imports_bytes / 1e9,
        "mesh": plan.mesh,
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    rows = []
    for layers in LAYERS:
        output = subprocess.run(
            [sys.executable, __file__, str(layers)], capture_output=True, text=True, check=True
        ).stdout
        rows.append(json.loads(output.splitlines()[-1]))
    print(f"{MODEL} on {CLUSTER}, batch {BATCH}, sequence {SEQ}")
    for row in rows:
        print(
            f"  {row['layers']:>3} layers: {row['cpu_s']:.2f} CPU s beyond {row['imports_s']:.2f} s of imports "
            f"({row['wall_s']:.2f} s elapsed), peak {row['peak_gb']:.2f} GB ({row['imports_gb']:.2f} after imports), {row['mesh']}"
        )
    print(f"  ratio {rows[1]['cpu_s'] / rows[0]['cpu_s']:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]))))
    else:
        main()
