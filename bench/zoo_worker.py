"""A worker of the zoo: a process that imports once and runs one model after the other.

In:  lines on standard input, `{"model": "llama", "steps": ["capture", "tp2"]}`.
Out: lines on standard output: a cell as JSON each, then `{"done": "llama", "rss_bytes": ..., "peak_bytes": ...}`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import warnings
from pathlib import Path


def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch

    from bench.zoo_run import run_model

    torch.set_num_threads(1)

    def say(answer: dict[str, object]) -> None:
        channel.write(json.dumps(answer) + "\n")
        channel.flush()

    say({"ready": os.getpid()})
    for line in sys.stdin:
        task = json.loads(line)
        for cell in run_model(task["model"], task["steps"]):
            say(cell.to_dict())
        say({"done": task["model"], "rss_bytes": rss_bytes(), "peak_bytes": _peak_bytes()})


def rss_bytes(pid: int | None = None) -> int:
    return int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
