"""Bad input gives one clear message: on the command line on standard error with its exit code, in Python an
AutoparError; and nothing that was there before is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autopar
from autopar import cli
from autopar.errors import ConstraintError, TrainingError
from tests.tiny import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = """
import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x):
        return {"loss": self.down(self.up(x).relu()).square().mean()}


class Branches(Mlp):
    def forward(self, x):
        y = self.up(x)
        if y.sum() > 0:  # the line that the error must name
            y = y + 1
        return {"loss": y.mean()}


class NoLoss(Mlp):
    def forward(self, x):
        return self.up(x)


def mlp():
    print("a model that prints")
    return Mlp(), {"x": torch.ones(4, 8)}


def wider():
    return Mlp(32), {"x": torch.ones(4, 8)}


def branches():
    return Branches(), {"x": torch.ones(4, 8)}


def no_loss():
    return NoLoss(), {"x": torch.ones(4, 8)}


def wrong_input():
    return Mlp(), {"y": torch.ones(4, 8)}


def frozen():
    return Mlp().requires_grad_(False), {"x": torch.ones(4, 8)}


def broken():
    raise ValueError("a mistake of my own")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "typo.yaml").write_text("device: h100\nnodez: 2\n")
    for name, memory in (("infinite", "1e400 GiB"), ("points", "8.0.0 GiB"), ("huge", "1e40 GiB")):
        text = f"device: {{base: h100, memory_bytes: {memory}}}\nnodes: 1\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "escape.yaml").write_text('device: h100\nnodes: 1\nname: "x\\x1b[2J"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def command(*arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of `autopar ARGUMENTS`."""
        monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return command


PLAN = ("plan", "models.py:mlp", "--batch=4", "--seq=8", "-q")
TRAIN = ("train", "models.py:mlp", "--batch=4", "--seq=8", "--cluster=cpu:1", "--steps=2", "-q")

COMMANDS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "batch does not divide": (("plan", "models.py:mlp", "--batch=3", "--seq=8"), 4, ("batch 4", "try batch 4")),
    "batch over the mesh": ((*PLAN, "--cluster=cpu:8", "--mesh=dp=8"), 2, ("batch 4", "dp*fsdp is 8", "try")),
    "unknown mesh axis": ((*PLAN, "--cluster=cpu:2", "--mesh=pp=2"), 2, ("'pp'", "dp, fsdp, ep, cp, tp")),
    "malformed mesh": ((*PLAN, "--cluster=cpu:2", "--mesh=tp=x"), 2, ("cannot read 'tp=x'", "'dp=2,tp=4'")),
    "mesh of size 0": ((*PLAN, "--cluster=cpu:2", "--mesh=tp=0"), 2, ("size 0", "positive")),
    "empty mesh": ((*PLAN, "--cluster=cpu:2", "--mesh="), 2, ("names no axis", "'dp=2,tp=4'")),
    "mesh of another size": ((*PLAN, "--cluster=cpu:2", "--mesh=tp=3"), 2, ("3", "2 devices")),
    "unknown logical axis": ((*PLAN, "--cluster=cpu:2", "--fix=headz=tp"), 5, ("headz", "one of batch")),
    "unknown axis in a constraint": ((*PLAN, "--fix=heads=tq"), 2, ("heads=tq", "'tq'", "dp, fsdp, ep, cp, tp")),
    "axis twice in a constraint": ((*PLAN, "--fix=heads=tp.tp"), 2, ("heads=tp.tp", "twice")),
    "malformed constraint": ((*PLAN, "--fix=heads"), 2, ("cannot read constraint 'heads'", "'heads=tp'")),
    "malformed sharding": ((*PLAN, "--fix=up.weight=[_@tp,"), 2, ("up.weight=[_@tp,", "[_@tp, _]")),
    "no such parameter": ((*PLAN, "--fix=nope=[_@tp, _]"), 5, ("nope", "matches no parameter", "down.weight")),
    "wrong number of dims": ((*PLAN, "--fix=up.weight=[_@tp]"), 5, ("has 1 dims, up.weight has 2",)),
    "clash": (
        (*PLAN, "--fix=up.weight=[_@tp, _]", "--fix=up.w*=[_, _@tp]"),
        5,
        ("`up.weight=[_@tp, _]`", "`up.w*=[_, _@tp]`", "drop one"),
    ),
    "control flow": (
        ("plan", "models.py:branches", "--batch=4", "--seq=8", "-q"),
        4,
        (f"models.py:{MODELS[: MODELS.index('if y.sum')].count(chr(10)) + 1}", "control flow"),
    ),
    "no loss": (("plan", "models.py:no_loss", "--batch=4", "--seq=8", "-q"), 4, ("no output loss", "output0")),
    "wrong input name": (("plan", "models.py:wrong_input", "--batch=4", "--seq=8"), 4, ("'x'", "wrong_input")),
    "function raises": (("plan", "models.py:broken", "-q"), 4, ("a mistake of my own", "models.py:", "broken")),
    "nothing to train": (
        ("train", "models.py:frozen", "--batch=4", "--seq=8", "--cluster=cpu:1"),
        4,
        ("no trainable parameter", "requires_grad_"),
    ),
    "cluster file": ((*PLAN, "--cluster=typo.yaml"), 3, ("nodez", "typo.yaml:2", "nodes: 64")),
    "cluster name": ((*PLAN, "--cluster=h1000:8"), 3, ("h1000", "h100")),
    "unknown model": (("plan", "nothing-of-the-kind"), 4, ("nothing-of-the-kind", "file.py:function")),
    "output in no folder": ((*PLAN, "--output=no/plan.json"), 7, ("no/plan.json", "a folder that exists")),
    "dump in no folder": ((*PLAN, "--dump=models.py/x"), 2, ("models.py/x", "a folder you can write to")),
    "plan is a folder": (("train", "models.py:mlp", "--plan=."), 7, ("Is a directory", "saved plan")),
    "plan is missing": (("train", "models.py:mlp", "--plan=no.json"), 7, ("no.json", "No such file")),
    "negative learning rate": ((*TRAIN, "--lr=-1"), 2, ("--lr",)),
    "no time for collectives": ((*TRAIN, "--timeout=0"), 2, ("--timeout",)),
    "resume from nowhere": ((*TRAIN, "--resume"), 2, ("--out",)),
    "restarts from nowhere": ((*TRAIN, "--restarts=2"), 2, ("--restarts needs --out",)),
    "a live view of JSON": ((*TRAIN, "--live", "--json"), 2, ("--live and --json",)),
    "export of nothing": (("export", "nowhere", "there"), 8, ("no complete checkpoint", "nowhere", "try")),
    "out is a file": ((*TRAIN, "--out=models.py"), 8, ("models.py", "cannot be written", "try")),
    "data for another task": ((*TRAIN, "--data=text.txt"), 2, ("--data", "mlp")),
    "generate without tokenizer": (("generate", "models.py:mlp", "hi"), 2, ("no tokenizer", "--tokenizer")),
    "generate without weights": (("generate", "llama-3.1-8b", "hi"), 2, ("no weights", "checkpoint folder")),
    "generate from an encoder": (("generate", "bert-large", "hi"), 2, ("masked-lm", "causal")),
    "more processes than a machine runs": (
        ("generate", "gpt2", "hi", "--processes=100000"),
        2,
        ("100000 processes", "torchrun"),
    ),
    "batch beyond all": (("plan", "smollm2-135m", "--batch=99999999999999999999"), 2, ("tokens per step", "try")),
    "two precisions for the runtime": ((*PLAN, "--precision=fp32|bf16", "--cluster=cpu:2"), 2, ("fp32|bf16", "space='all'")),
    "no precision": ((*PLAN, "--precision=", "--cluster=cpu:2"), 2, ("precision", "fp32, bf16")),
    "cuts are not fixed": ((*PLAN, "--fix=cuts=3/4", "--cluster=h100:2"), 2, ("cuts=3/4", "--layout with cuts")),
    "price of nobody's device": (
        ("budget", "gpt2", "--tokens=1e9", "--clusters=h100:8", "--price=a100=2"), 2, ("a100 has a price", "h100"),
    ),
    "two prices": (
        ("budget", "gpt2", "--tokens=1e9", "--price=h100=2", "--price=h100=3"), 2, ("two prices", "h100"),
    ),
    "price without device": (("budget", "gpt2", "--tokens=1e9", "--price==2"), 2, ("'=2' is no price", "h100=2.5")),
    "currency": (("budget", "gpt2", "--tokens=1e9", "--price=h100=2", "--currency=euros"), 2, ("'euros'", "EUR")),
    "cost that is none": (
        ("budget", "gpt2", "--tokens=1e9", "--price=h100=2", "--max-cost=nan"), 2, ("nan is no cost", "above 0"),
    ),
    "precision of no cluster": (
        ("budget", "gpt2", "--tokens=1e9", "--clusters=a100:8", "--precision=fp8"), 2, ("fp8", "a100 has", "bf16"),
    ),
    "memory beyond floats": ((*PLAN, "--cluster=infinite.yaml"), 3, ("1e400 GiB", "infinite.yaml:1", "GiB")),
    "memory with two points": ((*PLAN, "--cluster=points.yaml"), 3, ("8.0.0 GiB", "points.yaml:1", "unit")),
    "memory of no device": ((*PLAN, "--cluster=huge.yaml"), 3, ("less than or equal", "huge.yaml:1", "try")),
    "name that writes to the terminal": ((*PLAN, "--cluster=escape.yaml"), 3, ("name", "escape.yaml:3", "try")),
    "diff of no plan": (("diff", "models.py", "models.py"), 7, ("not readable as JSON", "models.py")),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS)
def test_command_says_what_is_wrong(here: Path, run: Callable[..., tuple[int, str, str]], case: str) -> None:
    arguments, expected, words = COMMANDS[case]
    code, out, err = run(*arguments)
    assert (code, out) == (expected, "")
    assert [word for word in words if word not in err] == [], err
    assert "Traceback" not in err


def test_a_head_count_that_does_not_divide_says_what_would() -> None:
    model, batch = tiny("llama")
    with pytest.raises(ConstraintError, match=r"2 and 4 heads over.*tp=8.*heads=tp(.|\n)*try"):
        autopar.plan(model, "cpu:8", example_inputs=batch, mesh="tp=8", fix=["heads=tp"])


@pytest.mark.parametrize("turn", [1, -1])
def test_a_clash_is_one_in_either_order(here: Path, turn: int) -> None:
    fix = ["hidden=tp", "model.layers.*.mlp.up_proj.weight=[_@tp, _]"][::turn]
    model, batch = tiny("llama")
    with pytest.raises(ConstraintError, match=r"hidden=tp`.*up_proj.weight=\[_@tp, _\]`"):
        autopar.plan(model, "cpu:2", example_inputs=batch, fix=fix)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def test_resume_says_where_it_starts(here: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    command = [word for word in TRAIN if word != "-q"]
    code, out, err = run(*command, "--out=run", "--resume", "--json")
    assert (code, [json.loads(line)["step"] for line in out.splitlines()]) == (0, [1, 2])
    assert "no checkpoint in run yet: starting at step 0" in err
    code, out, err = run(*command, "--out=run", "--resume", "--json", "--steps=3")
    assert (code, [json.loads(line)["step"] for line in out.splitlines()]) == (0, [3])
    assert "going on from the checkpoint of step 2" in err
    code, out, err = run(*command, "--out=run", "--resume", "--json", "--steps=3")
    assert (code, out) == (0, "")
    assert "nothing to do" in err
    code, out, err = run(*command, "--out=run", "--steps=3")
    assert (code, out) == (2, "")
    assert "the newest of step 3" in err
    assert "--resume" in err


# ---- generation ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer whose tokens are letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    model, _ = tiny("llama")
    model.save_pretrained(folder)  # type: ignore[operator]
    letters = Tokenizer(
        models.WordLevel({letter: number for number, letter in enumerate("?abcdefgh")}, unk_token="?")
    )
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?").save_pretrained(folder)
    return folder


GENERATE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "empty prompt": (("abc", ""), ("no tokens", "prompt 2")),
    "too long": (("abc", "--max-new-tokens=100000"), ("3 prompt tokens and 100000 new", "--max-new-tokens 2045")),
    "no tokenizer there": (("abc", "--tokenizer=models.py"), ("no tokenizer", "--tokenizer")),
}  # fmt: skip


@pytest.mark.parametrize("case", GENERATE)
def test_generate_says_what_is_wrong(
    here: Path, folder: Path, run: Callable[..., tuple[int, str, str]], case: str
) -> None:
    arguments, words = GENERATE[case]
    code, out, err = run("generate", str(folder), *arguments)
    assert (code, out) == (2, "")
    assert [word for word in words if word not in err] == [], err


def test_text_to_train_on_is_checked_at_the_door(
    here: Path, folder: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    (here / "short.txt").write_text("abc")
    sizes = ("--cluster=cpu:1", "--batch=2", "--seq=16", "-q")
    run("plan", str(folder), *sizes, "--output=plan.json")
    for arguments, words in (
        (("--data=no.txt",), "no.txt"),
        (("--data=short.txt",), "3 tokens"),
        (("--tokenizer=nowhere",), "nowhere"),
    ):
        code, out, err = run("train", str(folder), "--plan=plan.json", *arguments)
        assert (code, out) == (2, "")
        assert words in err


# ---- what is printed where -----------------------------------------------------------------------------------------


def test_json_is_all_there_is_on_standard_output(
    here: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run(*PLAN[:-1], "--cluster=cpu:2", "--json")
    assert code == 0
    assert json.loads(out)["model"]["name"] == "mlp"
    assert "a model that prints" in err
    assert "searching" in err


def test_quiet_is_quiet(here: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    _, _, err = run(*PLAN, "--cluster=cpu:2", "--output=plan.json")
    assert set(err.splitlines()) <= {"a model that prints"}


def test_no_progress_bars_or_warnings_of_other_libraries(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "autopar", "generate", str(folder), "abc", "--max-new-tokens=2", "--quiet"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


# ---- ids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"), [("input_ids", 96), ("input_ids", -1), ("labels", 97), ("labels", -5)]
)
def test_ids_that_the_model_does_not_know_are_refused(name: str, wrong: int) -> None:
    """Over a split vocabulary no rank holds such an id: without this check the result would silently be zero."""
    from tests.tiny import tiny

    model, batch = tiny("llama")
    run = autopar.compile(model, "cpu:1", batch)
    bad = {**batch, name: batch[name].clone()}
    bad[name][2, 3] = wrong
    with pytest.raises(TrainingError, match=rf"{name}\[2, 3\] is {wrong}(.|\n)*ids 0 to 95"):
        run.train_step(bad)
    run.train_step(batch)
