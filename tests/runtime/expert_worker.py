"""On every rank: one step of tiny models with experts on real processes; the largest relative error of a gradient."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.mesh import Mesh
from autopar.runtime.groups import end_rank, leave, wait_for_all
from tests.runtime.expert_cases import choices, expected, step_of_rank
from tests.runtime.processes import write_result

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    results = {}
    for case in sys.argv[1:]:
        name, mesh_text, load = case.split("/")
        mesh = Mesh.parse(mesh_text)
        found = step_of_rank(name, mesh, choices(name, mesh)[-1], load)
        wanted = expected(name, load)
        largest = max(float(gradient.norm()) for gradient in wanted.gradients.values())
        errors = [abs(found.loss / wanted.loss - 1)]
        for key, gradient in wanted.gradients.items():
            if key in found.gradients:
                scale = max(float(gradient.norm()), 1e-3 * largest)
                errors.append(float((found.gradients[key] - gradient).norm()) / scale)
        results[case] = max(errors)
        print(case, results[case], flush=True)
    write_result(results)
    wait_for_all()
    leave()
    end_rank()
