"""Export to Python: a planned model as a folder of source that runs without the model's own code.

In:  a Compiled (plan, rank program, stages, weights).
Out: a folder

    train.py                a short training loop, for torchrun
    blocks/*.py             one function per unique block: what a rank computes of it (`block_source.py`)
    program.json            calls, state, inputs and stages (`program_file.py`)
    plan.json               the plan
    constants.safetensors   buffers and constants
    weights/*.safetensors   parameters, unless left out

`autopar/exported.py` runs it. The same ops in the same order: loss and gradients are those of the Compiled, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from autopar import api
from autopar.block_source import Names, block_source, plain
from autopar.compiled import Compiled
from autopar.condition_source import condition_source
from autopar.errors import UsageError
from autopar.exported import CONSTANTS, PLAN, PROGRAM, WEIGHTS
from autopar.models.source import find_model
from autopar.passes.plan_writer import version_of
from autopar.plans import Plan
from autopar.program_file import ParameterEntry, program_file


def export_planned(
    model: str, plan: Path, folder: Path, *, weights: bool, seed: int, progress: Callable[[str], None]
) -> None:
    """`autopar export --format python`: capture and lower a model as a plan file says, and write it."""
    _check_free(folder)
    chosen = Plan.load(plan)
    torch.manual_seed(seed)  # as `autopar train` draws the weights of a model that has none
    compiled = api.compile(find_model(model), plan=chosen, progress=progress)
    progress("writing")
    export_python(compiled, folder, weights=weights)


def export_python(compiled: Compiled, folder: str | Path, *, weights: bool = True) -> None:
    """Write a planned model as Python. `weights`: also its parameters, as training begins (random ones are drawn now).

    Raises UsageError for a folder that is there or cannot be written, and for a model with an op that has no text.
    """
    target = Path(folder)
    _check_free(target)
    texts = _texts(compiled)
    state = compiled.whole_state()
    program = compiled.rank_program
    parameters = _parameters(compiled, state)
    constants = {
        name: state[name].detach().clone().contiguous()
        for name, layout in program.state.items()
        if layout.info.kind != "parameter"
    }
    constants.update({f"fixed {name}": value.clone().contiguous() for name, value in program.fixed.items()})
    functions, checks = _functions(compiled)
    file = program_file(program, compiled.stages, functions, checks, parameters, version_of())
    texts[PROGRAM], texts[PLAN], texts["train.py"] = file.text(), compiled.plan.to_json(), _train(compiled)
    partial = target.with_name(target.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "blocks").mkdir(parents=True)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        save_file(constants, partial / CONSTANTS)
        if weights:
            (partial / WEIGHTS).mkdir()
            save_torch_state_dict({name: state[name].detach() for name in parameters}, partial / WEIGHTS)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"the program cannot be written: {error}", where=str(target), hint="a folder with space"
        ) from error


def _check_free(target: Path) -> None:
    if target.exists():
        raise UsageError(
            "there is something already", where=str(target), hint="a folder that does not exist yet"
        )


def _functions(compiled: Compiled) -> tuple[dict[str, str], dict[int, str]]:
    """The names of the functions: of blocks by name, of conditions by number."""
    names = Names(())
    blocks = {name: names.fresh(name) for name in compiled.rank_program.blocks}
    conditions = compiled.rank_program.conditions
    return blocks, {number: names.fresh(f"condition_{number}") for number in range(len(conditions))}


def _texts(compiled: Compiled) -> dict[str, str]:
    """The source of every function, by file."""
    program = compiled.rank_program
    functions, checks = _functions(compiled)
    texts = {}
    for name, function in functions.items():
        paths = [call.path for call in program.calls if call.block == name and call.path]
        texts[f"blocks/{function}.py"] = block_source(
            replace(program.blocks[name], name=function), program.mesh, paths
        )
    for number, function in checks.items():
        texts[f"blocks/{function}.py"] = condition_source(program.conditions[number], function)
    written = (*functions.values(), *checks.values())
    lines = ['"""What one rank runs: a function per unique block. program.json says what calls them."""', ""]
    lines += [f"from .{function} import {function}" for function in written]
    lines += ["", "BLOCKS = {", *(f'    "{function}": {function},' for function in written), "}"]
    texts["blocks/__init__.py"] = "\n".join(lines) + "\n"
    return texts


def _parameters(compiled: Compiled, state: Mapping[str, Tensor]) -> dict[str, ParameterEntry]:
    """The model's own parameters by the names that the program has for them; tied ones have others too."""
    names = dict.fromkeys(
        layout.info.source(name)
        for name, layout in compiled.rank_program.state.items()
        if layout.info.kind == "parameter"
    )
    same: dict[int, list[str]] = {}
    for name, tensor in state.items():
        same.setdefault(id(tensor), []).append(name)
    return {
        name: ParameterEntry(
            dtype=str(state[name].dtype).removeprefix("torch."),
            aliases=tuple(alias for alias in same.get(id(state[name]), ()) if alias != name),
        )
        for name in names
    }


def _train(compiled: Compiled) -> str:
    plan = compiled.plan
    return _TRAIN.format(
        name=plain(plan.model.name),
        mesh=plan.whole_mesh,
        ranks=plan.whole_mesh.device_count,
        batch=plan.data.batch,
        seq=plan.data.seq,
    )


_TRAIN = '''"""Train {name} on {ranks} ranks ({mesh}).

    torchrun --nproc-per-node {ranks} train.py --data TOKENS --steps 100

What a rank computes is in blocks/, what calls it with which weights in program.json, how it was planned in plan.json.
Every rank is given the whole batch, and takes its piece.
"""

import argparse
from pathlib import Path

import torch
from blocks import BLOCKS

from autopar.data import Stream, TokenStore
from autopar.exported import load_exported
from autopar.runtime.groups import leave, wait_for_all

HERE = Path(__file__).resolve().parent
BATCH, SEQ = {batch}, {seq}  # sequences per step, tokens per sequence


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder of `autopar prepare` (default: random batches)")
    parser.add_argument("--weights", help="a .safetensors file or a folder of them (default: those exported)")
    parser.add_argument("--steps", type=int, default=10, help="the step to train up to")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip the gradient's global norm to this")
    parser.add_argument("--seed", type=int, default=0, help="of the data's order, and of random weights")
    parser.add_argument("--out", help="save to this folder at the end, and go on from what it has")
    parser.add_argument("--compile", action="store_true", help="run the blocks through torch.compile")
    return parser.parse_args()


def main():
    given = options()
    run = load_exported(HERE, BLOCKS, weights=given.weights, seed=given.seed, compiled=given.compile)
    run.start(max_norm=given.max_norm, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=given.lr))
    if given.out and Path(given.out).exists():
        run.load(given.out)
    stream = Stream(TokenStore(Path(given.data)), batch=BATCH, seq=SEQ, seed=given.seed) if given.data else None

    while run.trainer.step_count < given.steps:
        done = run.trainer.step_count
        batch = stream.at(done * BATCH) if stream else run.random_batch(seed=given.seed + done)
        result = run.train_step(batch)
        if run.trainer.groups.rank == 0:
            print(f"step {{result.step}}  loss {{result.loss:.6f}}  gradient norm {{result.gradient_norm:.4f}}", flush=True)

    if given.out:
        run.save(given.out)
    wait_for_all()
    leave()


if __name__ == "__main__":
    main()
'''
