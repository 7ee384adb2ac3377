"""The commands that run: prepare, train, generate, verify."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli_options import (
    PLANNING,
    BatchOption,
    ClusterOption,
    FixOption,
    JsonOption,
    LoraOption,
    MeshOption,
    MicroOption,
    ModelArgument,
    PrecisionOption,
    QuietOption,
    RecomputeOption,
    SeqOption,
    SpaceOption,
    TokenizerOption,
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
    optimizer: Annotated[
        str,
        typer.Option("--optimizer", help="adamw, sgd, muon, adafactor, or another of torch's, in lower case"),
    ] = "adamw",
    optimizer_option: Annotated[
        list[str] | None,
        typer.Option("--optimizer-option", help="what else it takes, as torch calls it: momentum=0.9"),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", help="settings of parameters by name: '*.bias lr=1e-4,weight_decay=0'"),
    ] = None,
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="learning rate")] = 3e-4,
    weight_decay: Annotated[
        float, typer.Option("--weight-decay", min=0.0, help="of matrices; norms and biases have none")
    ] = 0.0,
    schedule: Annotated[
        str, typer.Option("--schedule", help="of the learning rate: constant, linear, cosine or wsd")
    ] = "constant",
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="steps in which the rate rises")] = 0,
    min_lr: Annotated[
        float, typer.Option("--min-lr", min=0.0, max=1.0, help="what a schedule ends at, as a part of --lr")
    ] = 0.0,
    ema: Annotated[
        float | None, typer.Option("--ema", help="average the weights, keeping this much per step: 0.999")
    ] = None,
    max_norm: Annotated[
        float, typer.Option("--max-norm", min=0.0, help="clip the global gradient norm to this; 0: never")
    ] = 1.0,
    data: Annotated[
        str,
        typer.Option(
            "--data", help="a folder of `autopar prepare`, a text file, or 'pydoc': Python's help texts"
        ),
    ] = "pydoc",
    packing: Annotated[
        str,
        typer.Option(
            "--packing", help="of prepared documents: cut, all in a row; whole, none split over two rows"
        ),
    ] = "cut",
    lora: LoraOption = None,
    tokenizer: TokenizerOption = None,
    seed: Annotated[
        int, typer.Option("--seed", help="of the random weights and of the order of the data")
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="folder for checkpoints")] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            "--save-every",
            min=0,
            help="steps between checkpoints; 0: only the last (default: Daly's interval)",
        ),
    ] = None,
    keep: Annotated[int, typer.Option("--keep", min=0, help="how many checkpoints to keep; 0: all")] = 3,
    async_save: Annotated[
        bool | None,
        typer.Option(
            "--async-save/--sync-save", help="write checkpoints in the background (default: where it pays)"
        ),
    ] = None,
    mtbf_hours: Annotated[
        float | None,
        typer.Option(
            "--mtbf-hours", min=0.001, help="mean hours between failures of the whole run, for the interval"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest whole checkpoint in --out")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="compare checksums first: of data up to 4 GiB, and with --resume of the checkpoint",
        ),
    ] = True,
    restarts: Annotated[
        int,
        typer.Option("--restarts", min=0, help="start ranks that died again, so many times (needs --out)"),
    ] = 0,
    export: Annotated[
        bool,
        typer.Option("--export/--no-export", help="at the end, a model folder in --out for Transformers"),
    ] = True,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="a folder for TensorBoard")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", min=1, max=65535, help="Prometheus text on this port of localhost"),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="a live view instead of a line per step")] = False,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="STEPS:FILE, as 3-5:trace.json: a trace of these steps, for Perfetto"),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="run the blocks through torch.compile")] = False,
    fix: FixOption = None,
    mesh: MeshOption = None,
    micro_batches: MicroOption = None,
    recompute: RecomputeOption = None,
    precision: PrecisionOption = None,
    space: SpaceOption = None,
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
    from autopar.models.lora import Lora, with_lora
    from autopar.plans import Plan
    from autopar.runtime.checkpoint import check_target
    from autopar.runtime.groups import check_world
    from autopar.runtime.launch import attempt, launch, launched
    from autopar.runtime.optimizers import OptimizerSettings, parse_group, parse_options
    from autopar.runtime.schedules import Schedule
    from autopar.training import TrainOptions, check_fresh, train_rank
    from autopar.training_data import check_data

    settings = OptimizerSettings(
        optimizer,
        lr,
        weight_decay,
        options=parse_options(optimizer_option or ()),
        groups=tuple(parse_group(text) for text in group or ()),
    )
    rates = Schedule(schedule, steps, warmup, min_lr)

    for name, given in (("--resume", resume), ("--restarts", restarts)):
        if given and out is None:
            raise UsageError(f"{name} needs --out, the folder with the checkpoints")
    if live and as_json:
        raise UsageError("--live and --json both want standard output", hint="one of the two")
    if out is not None:
        check_target(out)
        if not (resume or launched() or attempt()):
            check_fresh(out)
    if verify and not launched():
        check_data(data)
    if plan_file is None:
        if launched() and int(os.environ["WORLD_SIZE"]) > 1:
            raise UsageError(
                "under torchrun a plan must be given",
                hint="autopar plan ... -o plan.json, then --plan plan.json",
            )
        with results(), progress(quiet) as tell:
            chosen = api.plan(
                model if lora is None else with_lora(model, Lora.parse(lora)),
                cluster,
                batch=batch,
                seq=seq,
                fix=fix or (),
                mesh=mesh,
                micro_batches=micro_batches,
                recompute=recompute,
                precision=precision,
                space=space,
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
            words = [*sys.argv[1:], *([] if plan_file else [f"--plan={file}"])]
            code = launch(words, processes, restarts=restarts)
        if code:
            raise typer.Exit(code)
        return
    check_world(chosen.parsed_mesh)
    with results() as tell_result:
        options = TrainOptions(
            steps=steps,
            optimizer=settings,
            schedule=rates,
            ema=ema,
            max_norm=max_norm,
            data=data,
            tokenizer=tokenizer,
            seed=seed,
            out=out,
            save_every=save_every,
            keep=keep,
            async_save=async_save,
            mtbf_hours=mtbf_hours,
            resume=resume,
            verify=verify,
            export=export,
            compiled=compiled,
            timeout_s=timeout,
            tensorboard=tensorboard,
            metrics_port=metrics_port,
            live=live,
            profile=profile,
            lora=lora,
            packing=packing,
            as_json=as_json,
            quiet=quiet,
        )
        code = train_rank(model, chosen, options, tell_result)
    if code:
        raise typer.Exit(code)


def _refuse_planning_options(context: typer.Context) -> None:
    """With --plan, an option that says how to make one would silently do nothing."""
    sources = {name: context.get_parameter_source(name) for name in PLANNING}
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
    tokenizer: TokenizerOption = None,
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
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="hf, peft: a checkpoint, a run's or an adapter's folder; python: a model",
            metavar="CHECKPOINT|MODEL",
        ),
    ],
    out: Annotated[Path, typer.Argument(help="the folder to write", metavar="OUT")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="hf: a folder that Transformers loads; peft: adapters; python: a planned model as source",
        ),
    ] = "hf",
    model: Annotated[
        str | None, typer.Option("--model", help="hf: what it is of (default: as the checkpoint says)")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="hf: float32, bfloat16, float16 (default: as trained)")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="hf: compare the checksums of all files first")
    ] = True,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="python: the plan of MODEL")] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="python: with the model's weights")
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="python: of random weights")] = 0,
    quiet: QuietOption = False,
) -> None:
    """Write a checkpoint of `autopar train` as a model folder, or a planned model as Python source."""
    from autopar.adapter import export as export_run

    if form not in ("hf", "peft", "python"):
        raise UsageError(f"there is no export format {form!r}", hint="--format hf, peft or python")
    if form == "python":
        from autopar.export_python import export_planned

        if plan_file is None or model is not None or dtype is not None:
            raise UsageError(
                "--format python takes a model and --plan, and neither --model nor --dtype",
                hint="autopar plan MODEL ... -o plan.json, then export --format python MODEL --plan plan.json OUT",
            )
        with progress(quiet) as tell:
            export_planned(source, plan_file, out, weights=weights, seed=seed, progress=tell)
        if not quiet:
            print(f"{out} written: torchrun {out}/train.py", file=sys.stderr)
        return
    if plan_file is not None or not weights:
        raise UsageError("--plan and --no-weights are for --format python", hint="to leave them out")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype {dtype} is none of the formats", hint="float32, bfloat16 or float16")
    chosen = export_run(Path(source), out, form=form, model=model, verify=verify, dtype=dtype)
    if not quiet:
        print(f"{chosen} written to {out}", file=sys.stderr)


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
