"""The `autopar` command.

    autopar plan llama-3.1-405b --cluster h100:2048x8 --batch 2048 --seq 8192 -o plan.json
    autopar estimate llama-3.1-405b --cluster h100:2048x8 --batch 2048 --seq 8192 --layout tp=8,pp=16,zero=1
    autopar explain plan.json --why-not tp=4 --what-if inter_bw=2x --sensitivity --robust --formula
    autopar report plan.json -o plan.html --trace trace.json
    autopar budget MODEL --tokens 15e12 --deadline 60d --price h100=2.5
    autopar train MODEL --cluster cpu:4 --steps 30
    autopar generate MODEL "The capital of France is" --processes 2
    autopar verify MODEL --cluster cpu:4 --plan plan.json

Standard output is the result (with --json, JSON and nothing else); progress and errors go to standard error. Exit
codes: 0 done; 2 the request cannot be understood; 3 cluster; 4 model; 5 sharding or constraint; 6 no plan fits;
7 plan file; 8 training; 9 a sharded step differs from the unsharded one; 1 anything else.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.errors import AutoparError, UsageError

if TYPE_CHECKING:
    from autopar.cluster import Cluster
    from autopar.cost.money import Budget

app = typer.Typer(
    help="Finds the fastest parallel plan for a PyTorch model on a cluster, and runs it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="a published name (autopar models), a checkpoint folder, or file.py:function", metavar="MODEL"
    ),
]
ClusterOption = Annotated[
    str, typer.Option("--cluster", "-c", help="h100:64x8, cpu:4, local, or a YAML file (autopar devices)")
]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="sequences per step over the whole cluster")]
SeqOption = Annotated[int, typer.Option("--seq", min=1, help="tokens per sequence")]
FixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fix", help="a constraint, such as tp=8, heads=tp or 'model.layers.*.up_proj.weight=[_@tp, _]'"
    ),
]
ForbidOption = Annotated[
    list[str] | None, typer.Option("--forbid", help="a decision to leave out, such as tp=8 or schedule=zbv")
]
SpaceOption = Annotated[
    str | None,
    typer.Option(
        "--space", help="runtime: what autopar train runs; all: every layout (default: runtime on cpu)"
    ),
]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", help="sizes to use instead of searching: dp=2,fsdp=1,tp=2")
]
MicroOption = Annotated[
    int | None, typer.Option("--micro-batches", min=1, help="gradient accumulation steps (default: searched)")
]
RecomputeOption = Annotated[
    str | None, typer.Option("--recompute", help="none, selective or full (default: searched)")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="fp32, bf16, fp8, mxfp8, nvfp4, or a choice bf16|fp8 (default: fp32 on cpu, else bf16)",
    ),
]
TokensOption = Annotated[
    float | None,
    typer.Option(
        "--tokens", help="tokens of the whole run, such as 15e12: adds days, cost, failures, goodput"
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="JSON on standard output, everything else on standard error")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="no progress")]


@app.command()
def plan(
    model: ModelArgument,
    cluster: ClusterOption = "local",
    batch: BatchOption = 8,
    seq: SeqOption = 128,
    fix: FixOption = None,
    mesh: MeshOption = None,
    micro_batches: MicroOption = None,
    recompute: RecomputeOption = None,
    precision: PrecisionOption = None,
    forbid: ForbidOption = None,
    space: SpaceOption = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="time, memory for the leanest plan, or robust: least regret if constants are off",
        ),
    ] = "time",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the plan to this file")] = None,
    dump: Annotated[
        Path | None, typer.Option("--dump", help="a folder that gets the program as text after every pass")
    ] = None,
    tokens: TokensOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fastest plan for training MODEL on a cluster, and say why."""
    from autopar import api

    with _results(), _progress(quiet) as tell:
        found = api.plan(
            model,
            cluster,
            batch=batch,
            seq=seq,
            fix=fix or (),
            mesh=mesh,
            micro_batches=micro_batches,
            recompute=recompute,
            precision=precision,
            forbid=forbid or (),
            space=space,
            objective=objective,
            dump=dump,
            progress=tell,
        )
    if output is not None:
        found.save(output)
    if tokens is None:
        print(found.to_json() if as_json else found.page())
    else:
        from autopar.budget import plan_budget

        run = plan_budget(found, tokens)
        _tell_result(found.page, lambda: json.loads(found.to_json()), found.parsed_cluster, run, as_json)
    if output is not None and not quiet:
        print(f"plan written to {output}", file=sys.stderr)


@app.command()
def estimate(
    model: Annotated[
        str,
        typer.Argument(help="as for plan; or a plan file (*.json), which has all the rest", metavar="MODEL"),
    ],
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="as for plan (default: the plan's, else local)")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="tp=8,pp=16,vpp=8,zero=1,mbs=1,recompute=none,precision=bf16; dp left out is filled in",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="sequences per step (default: the plan's, else 8)")
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, help="tokens per sequence (default: the plan's, else 128)")
    ] = None,
    software: Annotated[
        str | None, typer.Option("--software", help="the training stack (default: the newest for the device)")
    ] = None,
    measured: Annotated[
        str | None, typer.Option("--measured", help="a measured step time to compare with: 7.1s, 350ms")
    ] = None,
    tokens: TokensOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Price one layout of MODEL on a cluster, itemised; nothing is searched."""
    from autopar import api
    from autopar.pricing_page import seconds_of

    with _results(), _progress(quiet) as tell:
        found = api.estimate(
            model,
            cluster if cluster is not None or model.endswith(".json") else "local",
            layout=layout,
            batch=batch,
            seq=seq,
            software=software,
            measured_s=None if measured is None else seconds_of(measured),
            progress=tell,
        )
    run = None
    if tokens is not None:
        from autopar.budget import run_budget

        run = run_budget(
            found.cluster,
            step_s=found.step_s,
            tokens_per_step=found.batch * found.workload.seq,
            tokens=tokens,
            parameters=found.workload.parameters,
            frozen=found.workload.frozen,
        )
    _tell_result(found.page, found.to_dict, found.cluster, run, as_json)


def _tell_result(
    page: Callable[[], str], data: Callable[[], Any], cluster: Cluster, budget: Budget | None, as_json: bool
) -> None:
    """A page or its JSON, and what a whole run takes where that was asked for."""
    if as_json:
        from autopar.budget import budget_data

        print(json.dumps(data() if budget is None else {**data(), "budget": budget_data(budget)}, indent=1))
    else:
        from autopar.budget import budget_lines

        print(page() if budget is None else "\n".join([page(), "", *budget_lines(budget, cluster)]))


@app.command()
def budget(
    model: ModelArgument,
    tokens: Annotated[float, typer.Option("--tokens", help="tokens of the whole run, such as 15e12")],
    clusters: Annotated[
        str | None, typer.Option("--clusters", help="clusters to compare: h100:8x8,h100:64x8,my.yaml")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="compare 1, 2, 4, ... nodes of it (default: h100, without --clusters)"),
    ] = None,
    max_devices: Annotated[int, typer.Option("--max-devices", min=1, help="of --device, at most")] = 4096,
    batch: BatchOption = 1024,
    seq: SeqOption = 4096,
    max_cost: Annotated[
        float | None,
        typer.Option("--max-cost", help="the most the run may cost, in the currency of the prices"),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", help="the longest it may take: 30d, 36h, 6w")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option("--price", help="of a device hour: h100=2.5 (default: the cluster file's)"),
    ] = None,
    currency: Annotated[
        str | None, typer.Option("--currency", help="of --price (default: the cluster file's, else USD)")
    ] = None,
    fix: FixOption = None,
    forbid: ForbidOption = None,
    precision: PrecisionOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the picture to this file (.svg)")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Search clusters of many sizes for MODEL: time, cost, and which one meets a deadline or a cost.

    Exit code 6 where none meets the limits; the page then says what comes nearest.
    """
    from autopar import api
    from autopar import budget as offers

    limits = offers.Limits(None if deadline is None else offers.parse_days(deadline), max_cost)
    names = [name.strip() for name in clusters.split(",")] if clusters else []
    offered = offers.offered_clusters(
        names, devices=device or ([] if names else ["h100"]), max_devices=max_devices
    )
    prices = offers.parse_prices(price or ())
    offers.check_prices(prices, offered, currency)
    offered = [offers.with_prices(cluster, prices, currency) for cluster in offered]
    decisions, precisions = offers.asked(offered, limits, fix or (), forbid or (), precision)
    with _results(), _progress(quiet) as tell:
        workload = api.describe_model(model, batch=batch, seq=seq, precision=precisions[0], progress=tell)
        market = offers.market_of(
            workload, offered, limits, batch=batch, tokens=tokens, decisions=decisions, precisions=precisions,
            refine=not names, progress=tell,
        )  # fmt: skip
    print(json.dumps(market.data(), indent=1) if as_json else "\n".join(market.lines()))
    if output is not None:
        from autopar.budget_picture import frontier_svg

        _write(output, frontier_svg(market), quiet)
    if not market.answers:
        raise typer.Exit(6)


@app.command()
def report(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="the page, one file (default: the plan's name with .html)"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="also write the predicted step as a trace (ui.perfetto.dev reads it)"),
    ] = None,
    tokens: TokensOption = None,
    quiet: QuietOption = False,
) -> None:
    """Draw a plan: timeline, memory, times, mesh on the network, shardings, alternatives."""
    from autopar.budget import budget_lines, plan_budget
    from autopar.plans import Plan
    from autopar.report import report_html
    from autopar.report_trace import trace_json

    found = Plan.load(plan_file)
    lines = [] if tokens is None else budget_lines(plan_budget(found, tokens), found.parsed_cluster)[1:]
    page = report_html(found, budget=lines)
    events = None if trace is None else trace_json(found)
    _write(output or plan_file.with_suffix(".html"), page, quiet)
    if trace is not None and events is not None:
        _write(trace, events, quiet)


def _write(path: Path, text: str, quiet: bool) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", where=str(path), hint="a path in a folder that exists"
        ) from None
    if not quiet:
        print(f"written to {path}", file=sys.stderr)


@app.command()
def explain(
    plan_file: Annotated[Path, typer.Argument(help="a plan that autopar plan -o wrote", metavar="PLAN")],
    why_not: Annotated[
        list[str] | None, typer.Option("--why-not", help="tp=4, or tp=4,pp=8, or a whole layout; repeatable")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="inter_bw=2x, gpus=512, batch=1024, seq=16384, or several with commas (also intra_bw, latency, flops,"
            " memory, memory_bw); repeatable",
        ),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="what errors of the cost model's constants do to the choice")
    ] = False,
    robust: Annotated[
        bool, typer.Option("--robust", help="the layout with the least regret over those errors")
    ] = False,
    formula: Annotated[
        bool, typer.Option("--formula", help="seconds and bytes in sequence length S and batch B")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say why a plan is as it is, why not otherwise, and what if something were otherwise."""
    from autopar import explain as ask
    from autopar import explain_cost, explain_text
    from autopar.plans import Plan

    study = ask.Study.of(Plan.load(plan_file))
    data: dict[str, Any] = {}
    if not (why_not or what_if or sensitivity or robust or formula):
        data["why"] = ask.why(study)
    if why_not:
        data["why_not"] = [ask.why_not(study, words) for words in why_not]
    if what_if:
        data["what_if"] = [ask.what_if(study, words) for words in what_if]
    if sensitivity:
        data["sensitivity"] = explain_cost.uncertain(study)
    if robust:
        data["robust"] = explain_cost.steady(study)
    if formula:
        data["formula"] = explain_cost.symbols(study)
    print(explain_text.as_json(data) if as_json else explain_text.text(data))


@app.command()
def diff(one: Annotated[Path, typer.Argument()], other: Annotated[Path, typer.Argument()]) -> None:
    """Show where two plan files differ; exit code 1 if they do."""
    from autopar.plans import Plan

    text = Plan.load(one).diff(Plan.load(other))
    if text:
        print(text)
        raise typer.Exit(1)


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
        str, typer.Option("--data", help="a text file, or 'pydoc': the help texts that ship with Python")
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
        with _results(), _progress(quiet) as tell:
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
    with _results() as tell_result:
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
    with _results() as tell_result:
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

    with _results() as tell_result, _progress(quiet) as tell:
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


@app.command()
def models() -> None:
    """List the published models that ship with autopar."""
    from autopar.models.source import published_names

    print("\n".join(published_names()))


@app.command()
def devices() -> None:
    """List the devices that clusters can be made of."""
    from autopar.cluster import catalogue

    for name, title in catalogue().items():
        print(f"{name:12s} {title}")


@contextmanager
def _results() -> Iterator[Callable[[str], None]]:
    """What prints a result. All else that is printed meanwhile (a user's model may print) goes to standard error."""
    standard_output = sys.stdout
    with redirect_stdout(sys.stderr):
        yield lambda text: print(text, file=standard_output, flush=True)


def _hush() -> None:
    """Progress bars and warnings of torch and Transformers are not for the user of this command. Both read their
    settings when they are imported, so this comes before."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", module=r"torch|transformers")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """On a terminal one live line, elsewhere a line per pass, on standard error."""
    if quiet:
        yield lambda text: None
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting") as status:
            yield status.update
    else:
        yield lambda text: print(f"autopar: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the command; an AutoparError becomes a message and an exit code, never a traceback."""
    from autopar.runtime.launch import launched, report_error

    _hush()
    rank = int(os.environ.get("RANK", "0"))
    try:
        code = app(standalone_mode=False)
    except AutoparError as error:
        if not report_error(error, rank):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `autopar plan ... | head`: who reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        show = getattr(error, "show", None)
        if show is not None:  # a usage error of the command line itself
            show()
            sys.exit(2)
        if report_error(error, rank):
            sys.exit(1)
        raise
    if launched():
        from autopar.runtime.groups import end_rank

        end_rank(code if isinstance(code, int) else 0)
    sys.exit(code if isinstance(code, int) else 0)
