"""What planning costs: CPU seconds and peak memory of a cold process, at two depths of one model.

    python bench/planning.py

Plans llama-3.1-8b cut or stretched to 32 and 126 layers on h100:32x8, batch 512, sequence 8192, each in a process of
its own. Imports are timed apart. A search stops adding alternatives at a fixed number of placements, so both depths
make about as many; what the best plan alone needs differs more. Aims: under 5 s beyond imports, under 1.5 GB, and 126 layers within 1.2 of 32.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

MODEL, CLUSTER, BATCH, SEQ = "llama-3.1-8b", "h100:32x8", 512, 8192
LAYERS = (32, 126)
ROUNDS = 4  # other work on the machine only ever adds time: the least of several runs is compared


def measure(layers: int) -> dict[str, float | str]:
    """Plan once in this process."""
    import copy

    import transformers.models.llama.modeling_llama

    import autopar
    import autopar.api
    from autopar.models.source import find_model
    from autopar.passes import search

    assert autopar.api
    assert transformers.models.llama.modeling_llama
    imports_s, imports_bytes = time.process_time(), peak_bytes()
    wall = time.perf_counter()
    placements = 0
    place = search.solve

    def counted(*arguments: Any) -> Any:
        nonlocal placements
        placements += 1
        return place(*arguments)

    search.solve = counted  # type: ignore[assignment]
    config = copy.deepcopy(find_model(MODEL).config)
    assert config is not None
    config.num_hidden_layers = layers  # type: ignore[attr-defined]
    plan = autopar.plan(config, CLUSTER, batch=BATCH, seq=SEQ)  # type: ignore[arg-type]
    return {
        "layers": layers,
        "cpu_s": time.process_time() - imports_s,
        "wall_s": time.perf_counter() - wall,
        "imports_s": imports_s,
        "peak_gb": peak_bytes() / 1e9,
        "imports_gb": imports_bytes / 1e9,
        "placements": placements,
        "mesh": plan.mesh,
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    runs: dict[int, list[dict[str, float | str]]] = {layers: [] for layers in LAYERS}
    for _ in range(ROUNDS):
        for layers in LAYERS:
            command = [sys.executable, __file__, str(layers)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            runs[layers].append(json.loads(output.splitlines()[-1]))
    print(f"{MODEL} on {CLUSTER}, batch {BATCH}, sequence {SEQ}; {ROUNDS} cold runs of each depth, in turns")
    for layers, rows in runs.items():
        seconds = sorted(float(row["cpu_s"]) for row in rows)
        imports = min(float(row["imports_s"]) for row in rows)
        peak = max(float(row["peak_gb"]) for row in rows)
        every = ", ".join(f"{second:.2f}" for second in seconds)
        print(
            f"  {layers:>3} layers: {seconds[0]:.2f} CPU s beyond {imports:.2f} s of imports (all runs: {every})"
        )
        print(f"              peak {peak:.2f} GB, {rows[0]['placements']} placements, {rows[0]['mesh']}")
    least = [min(float(row["cpu_s"]) for row in rows) for rows in runs.values()]
    pairs = [f"{float(b['cpu_s']) / float(a['cpu_s']):.2f}" for a, b in zip(*runs.values(), strict=True)]
    print(f"  ratio of the least {least[1] / least[0]:.2f} (pair by pair: {', '.join(pairs)})")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]))))
    else:
        main()
