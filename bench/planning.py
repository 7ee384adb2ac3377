"""What planning costs: CPU seconds and peak memory of a cold process, capture included.

    python bench/planning.py [--rounds 3] [--only depth]

Each case is planned in a process of its own, rounds in turns; imports are timed apart. Other work on the machine only
ever adds time, so the least of several runs is what is compared. Cases and aims:

    large   Llama-3.1-405B on h100:2048x8 and DeepSeek-V3 on h800:256x8   6 s beyond imports, 1.5 GB
    small   Llama-3.1-8B on h100:32x8                                     4 s
    depth   that model with 32, 126 and 1,000 layers                      within 1.2 of each other
    width   that model on 8 to 100,000 GPUs                               within 2 of each other
    search  the layouts alone, without capture, for each of the above     (a part of each line)
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`layers`: instead of the model's own."""

    group: str
    model: str
    cluster: str
    batch: int
    seq: int
    layers: int | None = None

    def __str__(self) -> str:
        depth = f", {self.layers} layers" if self.layers else ""
        return f"{self.model}{depth} on {self.cluster}, batch {self.batch}, sequence {self.seq}"


CASES = (
    Case("large", "llama-3.1-405b", "h100:2048x8", 2048, 8192),
    Case("large", "deepseek-v3", "h800:256x8", 15360, 4096),
    Case("small", "llama-3.1-8b", "h100:32x8", 512, 8192),
    *(Case("depth", "llama-3.1-8b", "h100:32x8", 512, 8192, layers) for layers in (32, 126, 1000)),
    *(
        Case("width", "llama-3.1-8b", f"h100:{nodes}x8", batch, 8192)
        for nodes, batch in ((1, 64), (128, 2048), (12_500, 100_000))
    ),
)


def measure(case: Case) -> dict[str, float | str]:
    """Plan once in this process."""
    import copy

    import transformers.models.deepseek_v3.modeling_deepseek_v3
    import transformers.models.llama.modeling_llama

    import autopar
    import autopar.api
    from autopar.models.source import find_model
    from autopar.passes import layout_mixed

    assert autopar.api
    assert transformers.models.llama.modeling_llama
    assert transformers.models.deepseek_v3.modeling_deepseek_v3
    config = copy.deepcopy(find_model(case.model).config)
    assert config is not None
    if case.layers:
        config.num_hidden_layers = case.layers  # type: ignore[attr-defined]
    imports_s = time.process_time()
    search, spent = layout_mixed.search_or_relax, [0.0]

    def timed(*arguments: object, **options: object) -> object:
        start = time.process_time()
        try:
            return search(*arguments, **options)  # type: ignore[arg-type]
        finally:
            spent[0] += time.process_time() - start

    layout_mixed.search_or_relax = timed  # type: ignore[assignment]
    plan = autopar.plan(config, case.cluster, batch=case.batch, seq=case.seq)  # type: ignore[arg-type]
    return {
        "cpu_s": time.process_time() - imports_s,
        "search_s": spent[0],
        "imports_s": imports_s,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "layout": str(plan.layout),
        "step_s": plan.predicted.step_time_s,
        "within": plan.predicted.step_time_s / (plan.predicted.bound_s or 1.0) - 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds and memory of planning")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("large", "small", "depth", "width"))
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(CASES[arguments.case])))
        return
    chosen = [index for index, case in enumerate(CASES) if arguments.only in (None, case.group)]
    runs: dict[int, list[dict[str, float | str]]] = {index: [] for index in chosen}
    for _ in range(arguments.rounds):
        for index in chosen:
            command = [sys.executable, __file__, "--case", str(index)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            runs[index].append(json.loads(output.splitlines()[-1]))
    least: dict[str, list[float]] = {}
    for index, rows in runs.items():
        case = CASES[index]
        seconds = sorted(float(row["cpu_s"]) for row in rows)
        least.setdefault(case.group, []).append(seconds[0])
        print(case)
        print(
            f"    {seconds[0]:.2f} CPU s beyond {min(float(row['imports_s']) for row in rows):.2f} s of imports "
            f"(all: {', '.join(f'{second:.2f}' for second in seconds)}), of them "
            f"{min(float(row['search_s']) for row in rows):.2f} s of layout search; "
            f"peak {max(float(row['peak_gb']) for row in rows):.2f} GB"
        )
        first = rows[0]
        print(
            f"    {float(first['step_s']):.3f} s per step, within {100 * float(first['within']):.2f} %: {first['layout']}"
        )
    for group in ("depth", "width"):
        if group in least:
            ratio = max(least[group]) / min(least[group])
            print(f"{group}: the slowest takes {ratio:.2f} times the fastest")


if __name__ == "__main__":
    main()
