"""The commands that plan and tell: plan, estimate, budget, report, explain, diff."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli_options import (
    BatchOption,
    ClusterOption,
    FixOption,
    ForbidOption,
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
    TokensOption,
    app,
    progress,
    results,
    write_page,
)

if TYPE_CHECKING:
    from autopar.cluster import Cluster
    from autopar.cost.money import Budget


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
    lora: LoraOption = None,
    tokens: TokensOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fastest plan for training MODEL on a cluster, and say why."""
    from autopar import api
    from autopar.models.lora import Lora, with_lora

    with results(), progress(quiet) as tell:
        found = api.plan(
            model if lora is None else with_lora(model, Lora.parse(lora)),
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

    with results(), progress(quiet) as tell:
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
    from autopar import api, market
    from autopar import budget_asked as asked

    limits = asked.Limits(None if deadline is None else asked.parse_days(deadline), max_cost)
    names = [name.strip() for name in clusters.split(",")] if clusters else []
    offered = asked.offered_clusters(
        names, devices=device or ([] if names else ["h100"]), max_devices=max_devices
    )
    prices = asked.parse_prices(price or ())
    asked.check_prices(prices, offered, currency)
    offered = [asked.with_prices(cluster, prices, currency) for cluster in offered]
    decisions, precisions = asked.asked(offered, limits, fix or (), forbid or (), precision)
    with results(), progress(quiet) as tell:
        workload = api.describe_model(model, batch=batch, seq=seq, precision=precisions[0], progress=tell)
        found = market.market_of(
            workload, offered, limits, batch=batch, tokens=tokens, decisions=decisions, precisions=precisions,
            refine=not names, progress=tell,
        )  # fmt: skip
    print(json.dumps(found.data(), indent=1) if as_json else "\n".join(found.lines()))
    if output is not None:
        from autopar.budget_picture import frontier_svg

        write_page(output, frontier_svg(found), quiet)
    if not found.answers:
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
    write_page(output or plan_file.with_suffix(".html"), page, quiet)
    if trace is not None and events is not None:
        write_page(trace, events, quiet)


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
