"""What the commands share: the Typer app, options that several of them take, where output goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from autopar.errors import UsageError

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
        "--space", help="runtime: data, fsdp, experts, tensor; all: every layout (default: runtime on cpu)"
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
# The parameters of `plan` and `train` that say how to make a plan: a plan that is given replaces them.
PLANNING = ("cluster", "batch", "seq", "fix", "mesh", "micro_batches", "recompute", "precision", "space")
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", help="a folder with tokenizer.json (default: MODEL's)")
]
LoraOption = Annotated[
    str | None,
    typer.Option(
        "--lora", help="train adapters only: r=16,alpha=32,targets=q_proj,v_proj (or targets=all-linear)"
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="JSON on standard output, everything else on standard error")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="no progress")]


@contextmanager
def results() -> Iterator[Callable[[str], None]]:
    """What prints a result. All else that is printed meanwhile (a user's model may print) goes to standard error."""
    standard_output = sys.stdout
    with redirect_stdout(sys.stderr):
        yield lambda text: print(text, file=standard_output, flush=True)


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """On a terminal one live line, elsewhere a line per pass, on standard error."""
    if quiet:
        yield lambda text: None
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting") as status:
            yield status.update
    else:
        yield lambda text: print(f"autopar: {text}", file=sys.stderr, flush=True)


def write_page(path: Path, text: str, quiet: bool) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", where=str(path), hint="a path in a folder that exists"
        ) from None
    if not quiet:
        print(f"written to {path}", file=sys.stderr)
