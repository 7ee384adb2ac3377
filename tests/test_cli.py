"""The command line, in process: what is printed where, and exit codes."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

from autopar import cli_plan, cli_run
from autopar.cli import main
from autopar.cli_options import PLANNING


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.fixture
def autopar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return lambda *arguments: run(capsys, monkeypatch, *arguments)


SIZES = ("--cluster", "h100:1x8", "--batch", "32", "--seq", "512")


def test_json_is_the_plan_and_nothing_else(autopar, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, err = autopar("plan", "gpt2", *SIZES, "--json", "-o", str(tmp_path / "plan.json"))
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "plan.json").read_text())
    assert "searching" in err


def test_quiet_says_nothing_but_the_page(autopar) -> None:  # type: ignore[no-untyped-def]
    code, out, err = autopar("plan", "gpt2", *SIZES, "--quiet")
    assert code == 0
    assert err == ""
    for word in ("mesh", "axes", "stages", "memory", "step", "rejected"):
        assert word in out


def test_dump_writes_the_program_after_every_pass(autopar, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, _ = autopar(
        "plan",
        "gpt2",
        *SIZES,
        "--quiet",
        "--dump",
        str(tmp_path),
        "--mesh",
        "dp=4,tp=2",
        "--space",
        "runtime",
    )
    assert code == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "1-capture.txt", "2-axes.txt", "3-problem.txt", "4-lowered.txt", "5-plan.json"
    ]  # fmt: skip
    assert "block transformer_h (called 12x)" in (tmp_path / "1-capture.txt").read_text()


def test_diff_tells_two_plans_apart(autopar, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    one, other = str(tmp_path / "one.json"), str(tmp_path / "other.json")
    autopar("plan", "gpt2", *SIZES, "-q", "-o", one, "--mesh", "dp=8")
    autopar("plan", "gpt2", *SIZES, "-q", "-o", other, "--mesh", "fsdp=8")
    assert autopar("diff", one, one)[:2] == (0, "")
    code, out, _ = autopar("diff", one, other)
    assert code == 1
    assert "fsdp=8" in out


def test_lists(autopar) -> None:  # type: ignore[no-untyped-def]
    assert "llama-3.1-405b" in autopar("models")[1].splitlines()
    assert "H100" in autopar("devices")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("plan", "lama-3.1-8b", *SIZES), 4, "llama-3.1-8b"),
        (("plan", "gpt2", "--cluster", "h1000:8"), 3, "h100"),
        (("plan", "gpt2", *SIZES, "--mesh", "tp=3"), 2, "8 devices"),
        (("plan", "gpt2", *SIZES, "--fix", "heads=tp", "--mesh", "tp=8"), 5, "heads"),
        (("plan", "gpt2", "--cluster", "h100:1x8", "--batch", "7", "--mesh", "dp=8"), 2, "7"),
        (("plan", "llama-3.1-405b", "--cluster", "h100:1x8", "--batch", "8", "--seq", "8192"), 6, "GiB"),
        (("plan", "gpt2", "--frobnicate"), 2, "frobnicate"),
        (("train", "gpt2", "--plan", "/no/such/plan.json"), 7, "no/such/plan.json"),
        (("train", "gpt2", "--plan", "plan.json", "--batch", "8"), 2, "--batch is for making a plan"),
    ],
)
def test_errors_are_messages_with_an_exit_code(
    autopar, arguments: tuple[str, ...], code: int, says: str
) -> None:  # type: ignore[no-untyped-def]
    found, out, err = autopar(*arguments)
    assert found == code
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_a_plan_replaces_every_option_that_makes_one() -> None:
    asked = (
        inspect.signature(cli_plan.plan).parameters.keys()
        & inspect.signature(cli_run.train).parameters.keys()
    )
    assert asked - {"model", "lora", "as_json", "quiet"} == set(PLANNING)  # adapters are part of the model
