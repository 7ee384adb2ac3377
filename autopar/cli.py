"""The `autopar` command.

    autopar plan llama-3.1-405b --cluster h100:2048x8 --batch 2048 --seq 8192 -o plan.json
    autopar estimate llama-3.1-405b --cluster h100:2048x8 --batch 2048 --seq 8192 --layout tp=8,pp=16,zero=1
    autopar explain plan.json --why-not tp=4 --what-if inter_bw=2x --sensitivity --robust --formula
    autopar report plan.json -o plan.html --trace trace.json
    autopar budget MODEL --tokens 15e12 --deadline 60d --price h100=2.5
    autopar prepare corpus.jsonl --tokenizer MODEL -o tokens
    autopar train MODEL --cluster cpu:4 --steps 30 --data tokens
    autopar export run model --format hf
    autopar generate MODEL "The capital of France is" --processes 2
    autopar verify MODEL --cluster cpu:4 --plan plan.json

Standard output is the result (with --json, JSON and nothing else); progress and errors go to standard error. Exit
codes: 0 done; 2 the request cannot be understood; 3 cluster; 4 model; 5 sharding or constraint; 6 no plan fits;
7 plan file; 8 training; 9 a sharded step differs from the unsharded one; 75 ended by SIGTERM with a checkpoint written; 1 anything else.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import NoReturn

import typer

from autopar import cli_plan, cli_run
from autopar.cli_options import app
from autopar.errors import AutoparError

__all__ = ["app", "main"]

# Imported for the commands they add to the app.
_COMMANDS = (cli_plan, cli_run)


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


def _hush() -> None:
    """Progress bars and warnings of torch and Transformers are not for the user of this command. Both read their
    settings when they are imported, so this comes before."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", module=r"torch|transformers")


def main() -> None:
    """Run the command; an AutoparError becomes a message and an exit code, never a traceback."""
    from autopar.runtime.launch import report_error

    _hush()
    rank = int(os.environ.get("RANK", "0"))
    try:
        code = app(standalone_mode=False)
    except AutoparError as error:
        if not report_error(error, rank):
            print(f"error: {error}", file=sys.stderr)
        _leave_with(error.exit_code)
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
    _leave_with(code if isinstance(code, int) else 0)


def _leave_with(code: int) -> NoReturn:
    """End; one rank of several without waiting for its threads, of which one may write a checkpoint with a lost peer."""
    from autopar.runtime.launch import launched

    if launched():
        from autopar.runtime.groups import end_rank

        end_rank(code)
    sys.exit(code)
