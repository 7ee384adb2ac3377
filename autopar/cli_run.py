"""The commands that run: prepare, train, generate, verify."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli_options import (
    BatchOption,
    ClusterOption,
    FixOption,
    JsonOption,
    MeshOption,
    MicroOption,
    ModelArgument,
    PrecisionOption,
    QuietOption,
    RecomputeOption,
    SeqOption,
    app,
    progress,
    results,
)
from autopar.errors import UsageError


@app.command()
def prepare(
    sources: Annotated[
        list[Path],
        typer.Argument(help=".txt, .jsonl or .parquet files, or folders of them", metavar="FILE..."),
    ],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="a folder with tokenizer.json")],
    out: Annotated[Path, typer.Option("--out", "-o", help="the folder to write the tokens to")],
    field: Annotated[
        str | None,
        typer.Option("--field", help="what holds the text (default: text, or messages of a conversation)"),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Tokenise text or conversations once, for `autopar train --data FOLDER`.

    Of a conversation, through the tokenizer's chat template, only what the assistant says is trained on.
    """
    from autopar.data import prepare as prepare_tokens

    with results() as tell_result, progress(quiet) as tell:
        store = prepare_tokens(sources, tokenizer=tokenizer, out=out, field=field, progress=tell)
        tell_result(f"{store.tokens:,} tokens of {store.documents:,} documents in {out}")


@app.command()
def train(
    context: typer.Context,
    model: ModelArgument,
    cluster: ClusterOption = "local",
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="train with this plan instead of making one")
    ] = None,
    batch: BatchOption = 8,
    seq: SeqOption = 128,
    steps: Annotated[int, typer.Option("--steps", min=1, help="the step to train up to")] = 30,
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="AdamW's learning rate")] = 3e-4,
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0.0)] = 0.0,
    max_norm: Annotated[
        float, typer.Option("--max-norm", min=0.0, help="clip the global gradient norm to this; 0: never")
    ] = 1.0,
    data: Annotated[
        str,
        typer.Option(
            "--data", help="a folder of `autopar prepare`, a text file, or 'pydoc': Python's help texts"
        ),
    ] = "pydoc",
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="a folder with tokenizer.json (default: MODEL's)")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="of the random weights and of the order of the data")
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="folder for checkpoints")] = None,
    save_every: Annotated[
        int, typer.Option("--save-every", min=0, help="steps between checkpoints; 0: only the last")
    ] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the checkpoint in --out")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="run the blocks through torch.compile")] = False,
    fix: FixOption = None,
    mesh: MeshOption = None,
    micro_batches: MicroOption = None,
    recompute: RecomputeOption = None,
    precision: PrecisionOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="seconds after which a collective gives up")
    ] = 300.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train MODEL with the plan found for the cluster, on one process per device of this machine.

    Under torchrun (any launcher that sets WORLD_SIZE) this process is one rank; else the ranks are started here.
    """
    from autopar import api
    from autopar.commands import TrainOptions, train_rank
    from autopar.plans import Plan
    from autopar.runtime.checkpoint import check_target
    from autopar.runtime.groups import check_world
    from autopar.runtime.launch import launch, launched

    if resume and out is None:
        raise UsageError("--resume needs --out, the folder with the checkpoint")
    if out is not None:
        check_target(out)
    if plan_file is None:
        if launched() and int(os.environ["WORLD_SIZE"]) > 1:
            raise UsageError(
                "under torchrun a plan must be given",
                hint="autopar plan ... -o plan.json, then --plan plan.json",
            )
        with results(), progress(quiet) as tell:
            chosen = api.plan(
                model,
                cluster,
                batch=batch,
                seq=seq,
                fix=fix or (),
                mesh=mesh,
                micro_batches=micro_batches,
                recompute=recompute,
                precision=precision,
                space="runtime",
                progress=tell,
            )
    else:
        if not launched():
            _refuse_planning_options(context)
        chosen = Plan.load(plan_file)
    processes = chosen.parsed_mesh.device_count
    if processes > 1 and not launched():
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
            file = plan_file or Path(folder) / "plan.json"
            if plan_file is None:
                chosen.save(file)
                if not quiet:
                    print(f"plan: {chosen.mesh}, {processes} processes", file=sys.stderr)
            # Each rank gets this very command line, and the plan; with a plan, what it was made from is not asked again.
            launch([*sys.argv[1:], *([] if plan_file else [f"--plan={file}"])], processes)
        return
    check_world(chosen.parsed_mesh)
    with results() as tell_result:
        options = TrainOptions(
            steps=steps,
            lr=lr,
            weight_decay=weight_decay,
            max_norm=max_norm,
            data=data,
            tokenizer=tokenizer,
            seed=seed,
            out=out,
            save_every=save_every,
            resume=resume,
            compiled=compiled,
            timeout_s=timeout,
            as_json=as_json,
            quiet=quiet,
        )
        train_rank(model, chosen, options, tell_result)


def _refuse_planning_options(context: typer.Context) -> None:
    """With --plan, an option that says how to make one would silently do nothing."""
    planning = ("cluster", "batch", "seq", "fix", "mesh", "micro_batches", "recompute", "precision")
    sources = {name: context.get_parameter_source(name) for name in planning}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise UsageError(
            f"--{given[0].replace('_', '-')} is for making a plan, and --plan gives one",
            hint="to leave one of the two out",
        )


@app.command()
def generate(
    model: ModelArgument,
    prompts: Annotated[list[str], typer.Argument(help="one or more prompts", metavar="PROMPT...")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 64,
    processes: Annotated[
        int,
        typer.Option("--processes", min=1, help="split the model over this many processes (tensor parallel)"),
    ] = 1,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="a folder with tokenizer.json (default: MODEL's)")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Continue prompts greedily, token for token what Transformers' greedy `generate` gives in fp32."""
    from autopar.commands import generate_rank
    from autopar.runtime.launch import launch, launched

    if processes > 1 and not launched():
        launch(sys.argv[1:], processes)
        return
    with results() as tell_result:
        generate_rank(model, prompts, max_new_tokens, processes, tokenizer, as_json, tell_result)


@app.command()
def verify(
    model: ModelArgument,
    cluster: Annotated[
        str,
        typer.Option("--cluster", "-c", help="how many ranks, as cpu:4 (with --plan, the plan's mesh at 2)"),
    ] = "cpu:4",
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="check this plan's placement instead of one made here")
    ] = None,
    mesh: MeshOption = None,
    fix: FixOption = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="sequences (default 8)")] = None,
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="tokens per sequence (default 16)")] = None,
    shrink: Annotated[
        bool,
        typer.Option("--shrink/--no-shrink", help="check a tiny copy of a Transformers model, or itself"),
    ] = True,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="the largest relative error that passes")
    ] = 1e-4,
    seed: Annotated[int, typer.Option("--seed", help="of the random weights")] = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check loss, gradients and an optimizer step of MODEL sharded against unsharded; exit code 9 if they differ."""
    from autopar.commands import verify_here

    with results() as tell_result, progress(quiet) as tell:
        passed = verify_here(
            model,
            cluster,
            as_json=as_json,
            tell_result=tell_result,
            plan=plan_file,
            mesh=mesh,
            fix=fix or (),
            batch=batch,
            seq=seq,
            shrink=shrink,
            tolerance=tolerance,
            seed=seed,
            progress=tell,
        )
    if not passed:
        raise typer.Exit(9)
