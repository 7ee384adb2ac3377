"""An exported Python program computes what the Compiled does, bit for bit, and needs neither capture nor the model."""

from __future__ import annotations

import importlib.util
import itertools
import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from typer.testing import CliRunner

from autopar import api
from autopar.block_source import block_source
from autopar.cli import app
from autopar.compiled import Compiled
from autopar.errors import AutoparError, TrainingError, UsageError
from autopar.export_python import export_python
from autopar.exported import ExportedRun, load_exported
from autopar.mesh import Mesh
from autopar.passes.fp8 import use_fp8
from autopar.passes.lower import RankBlock
from autopar.plans import Plan
from autopar.runtime.optimizers import OptimizerSettings
from autopar.runtime.simulate import simulate
from tests.multimodal import IMAGE, multimodal
from tests.runtime.composition import compile_layout, model_and_batch
from tests.tiny import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


_NUMBERS = itertools.count()


def blocks_of(folder: Path) -> Mapping[str, Callable[..., Any]]:
    """BLOCKS of an exported folder: what `from blocks import BLOCKS` gives beside its train.py."""
    name = f"exported_{next(_NUMBERS)}"
    spec = importlib.util.spec_from_file_location(name, folder / "blocks" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return dict(module.BLOCKS)


compiled_layout = cache(compile_layout)  # not started: `on_all_ranks` runs copies


def exported(kind: str, layout: str, folder: Path) -> tuple[Compiled, ExportedRun, dict[str, Tensor]]:
    run, batch = compiled_layout(kind, layout)
    export_python(run, folder)
    return run, load_exported(folder, blocks_of(folder)), batch


def results(run: Compiled, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], float]:
    """On one rank: the loss, this rank's own gradients, and the loss after one step."""
    run.start(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), max_norm=1.0)
    loss = run.trainer.gradients(batch)
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in run.parameters.items()
        if parameter.grad is not None
    }
    run.trainer.optimizer.zero_grad()
    run.train_step(batch)
    return loss, gradients, run.trainer.gradients(batch)


def on_all_ranks(run: Compiled, batch: dict[str, Tensor]) -> list[tuple[float, dict[str, Tensor], float]]:
    ranks = run.plan.whole_mesh.device_count
    return simulate(ranks, lambda _: results(run.on_rank(), batch), timeout_s=120)


def equal(
    left: tuple[float, dict[str, Tensor], float], right: tuple[float, dict[str, Tensor], float]
) -> bool:
    return (
        left[0] == right[0]
        and left[2] == right[2]
        and left[1].keys() == right[1].keys()
        and all(torch.equal(value, right[1][name]) for name, value in left[1].items())
    )


LAYOUTS = [
    ("llama", "tp=2,mbs=8"),
    ("llama", "dp=2,tp=2,zero=3,mbs=4,recompute=selective"),
    ("llama", "pp=2,schedule=1f1b,mbs=2"),
    ("mixtral", "dp=2,ep=2,zero=1,mbs=4"),
    pytest.param("llama", "cp=2,mbs=8", marks=pytest.mark.slow),
    pytest.param("deepseek", "dp=2,tp=2,pp=2,vpp=2,schedule=zbv,zero=1,mbs=2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_the_same_bits(kind: str, layout: str, tmp_path: Path) -> None:
    run, again, batch = exported(kind, layout, tmp_path / "out")
    before, after = on_all_ranks(run, batch), on_all_ranks(again, batch)
    assert all(map(equal, before, after))
    assert all(gradients for _, gradients, _ in before)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("llama", "bf16"),
        ("convnet", "fp32"),
        pytest.param("gpt2", "fp32", marks=pytest.mark.slow),
        pytest.param("t5", "fp32", marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_of_other_models(kind: str, precision: str, tmp_path: Path) -> None:
    model, batch = tiny(kind)
    run = api.compile(model, "cpu:2", batch, mesh="tp=2", precision=precision)
    export_python(run, tmp_path / "out")
    again = load_exported(tmp_path / "out", blocks_of(tmp_path / "out"))
    assert all(map(equal, on_all_ranks(run, batch), on_all_ranks(again, batch)))


def test_linear_layers_in_fp8(tmp_path: Path) -> None:
    model, batch = tiny("llama")
    run = api.compile(model, "cpu:2", batch, mesh="tp=2", precision="bf16")
    run.rank_program = use_fp8(run.rank_program)
    export_python(run, tmp_path / "out")
    again = load_exported(tmp_path / "out", blocks_of(tmp_path / "out"))
    assert "fp8_functions.fp8_linear(" in (tmp_path / "out" / "blocks" / "model_layers.py").read_text()
    assert all(map(equal, on_all_ranks(run, batch), on_all_ranks(again, batch)))


@pytest.mark.slow
def test_the_same_bits_through_torch_compile(tmp_path: Path) -> None:
    model, batch = model_and_batch("llama")
    run = api.compile(model, "cpu:1", batch, compiled=True)
    export_python(run, tmp_path / "out")
    again = load_exported(tmp_path / "out", blocks_of(tmp_path / "out"), compiled=True)
    assert equal(results(run, batch), results(again, batch))


def test_the_source_is_what_runs(tmp_path: Path) -> None:
    """What an engineer changes in a block changes what is computed."""
    run, again, batch = exported("llama", "tp=2,mbs=8", tmp_path / "out")
    file = tmp_path / "out" / "blocks" / "model_layers.py"
    text = file.read_text()
    assert text.count("F.silu(") == 1
    file.write_text(text.replace("F.silu(", "F.softplus("))
    other = load_exported(tmp_path / "out", blocks_of(tmp_path / "out"))
    loss, changed = on_all_ranks(again, batch)[0][0], on_all_ranks(other, batch)[0][0]
    assert loss == on_all_ranks(run, batch)[0][0]
    assert abs(changed - loss) > 1e-5


def test_the_source_reads_like_the_model(tmp_path: Path) -> None:
    exported("llama", "dp=2,tp=2,mbs=4", tmp_path / "out")
    lines = [
        " ".join(line.split())
        for line in (tmp_path / "out" / "blocks" / "model_layers.py").read_text().splitlines()
    ]
    wanted = [
        "self_attn_q_proj_weight: Tensor, # [16, 32] [heads@tp, hidden]",
        "# ---- self_attn",
        "q_proj = F.linear(all_gather, self_attn_q_proj_weight) # [4, 16, 16] [batch@dp, sequence, heads@tp]",
        "o_proj = F.linear(reshape_4, self_attn_o_proj_weight) # [4, 16, 32] [batch@dp, sequence, hidden] + sum(tp)",
        "reduce_scatter = collectives.reduce_scatter(o_proj, dim=1, group=tp, size=2) "
        "# [4, 8, 32] [batch@dp, sequence@tp, hidden]",
        "# ---- mlp",
    ]
    places = [lines.index(line) for line in wanted]
    assert places == sorted(places)
    assert any(line.endswith("hidden_states = residual + hidden_states") and ".py:" in line for line in lines)


# ---- under torchrun ----------------------------------------------------------------------------------------------


def torchrun(folder: Path, ranks: int, *arguments: str, without: Path) -> list[str]:
    """The lines that `train.py` prints, in an environment where Transformers cannot be imported."""
    (without / "transformers").mkdir(parents=True)
    (without / "transformers" / "__init__.py").write_text(
        "raise ImportError('an exported program needs no Transformers')"
    )
    root = Path(__file__).resolve().parents[1]
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(folder / "train.py"),
    ]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *command, *arguments],
        env={**os.environ, "PYTHONPATH": f"{without}:{root}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, cwd=without,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return [line for line in run.stdout.splitlines() if line.startswith("step")]


def test_under_torchrun_without_transformers(tmp_path: Path) -> None:
    run, again, _ = exported("llama", "dp=2,zero=1,mbs=4", tmp_path / "out")

    lines = torchrun(
        tmp_path / "out", 2, "--steps", "2", "--out", str(tmp_path / "run"), without=tmp_path / "path"
    )

    def train(compiled: Compiled) -> list[str]:
        compiled.start(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
        steps = [compiled.train_step(again.random_batch(seed=number)) for number in range(2)]
        return [
            f"step {step.step}  loss {step.loss:.6f}  gradient norm {step.gradient_norm:.4f}"
            for step in steps
        ]

    assert lines == simulate(2, lambda _: train(run.on_rank()), timeout_s=60)[0]
    assert [folder.name for folder in (tmp_path / "run").iterdir()] == ["step-00000002"]


LINEAR = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.down(self.up(x).relu()), labels)}


def build():
    return Model(), {"x": torch.randn(4, 8), "labels": torch.randint(0, 4, (4,))}
"""


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "linear.py").write_text(LINEAR)
    model = f"{tmp_path / 'linear.py'}:build"
    plan = tmp_path / "plan.json"
    runner = CliRunner()
    made = runner.invoke(
        app, ["plan", model, "--cluster", "cpu:2", "--batch", "4", "--mesh", "tp=2", "-o", str(plan)]
    )
    assert made.exit_code == 0, made.output
    words = [
        "export",
        "--format",
        "python",
        str(model),
        "--plan",
        str(plan),
        str(tmp_path / "out"),
        "--no-weights",
    ]
    done = runner.invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"train.py", "blocks", "program.json", "plan.json", "constants.safetensors"}
    run = load_exported(tmp_path / "out", blocks_of(tmp_path / "out"))
    losses = simulate(2, lambda _: run.on_rank().start().train_step(run.random_batch(0)).loss, timeout_s=60)
    assert losses[0] == losses[1]
    with pytest.raises(UsageError, match="there is something already"):
        runner.invoke(app, words, catch_exceptions=False)
    with pytest.raises(UsageError, match="takes a model and --plan"):
        runner.invoke(app, ["export", "--format", "python", model, "out"], catch_exceptions=False)


# ---- weights -----------------------------------------------------------------------------------------------------


def test_weights_by_the_models_own_names(tmp_path: Path) -> None:
    """A folder that Transformers saved, in which tied weights have one of their names."""
    run, batch = compiled_layout("llama", "tp=2,mbs=8")
    export_python(run, tmp_path / "out", weights=False)
    model, _ = model_and_batch("llama")
    assert isinstance(model, nn.Module)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    blocks = blocks_of(tmp_path / "out")
    again = load_exported(tmp_path / "out", blocks, weights=tmp_path / "model")
    assert all(map(equal, on_all_ranks(run, batch), on_all_ranks(again, batch)))
    drawn = [on_all_ranks(load_exported(tmp_path / "out", blocks, seed=1), batch)[0][0] for _ in range(2)]
    assert drawn[0] == drawn[1] != on_all_ranks(run, batch)[0][0]


# ---- what is wrong is told ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("exported") / "out"
    export_python(compiled_layout("llama", "tp=2,mbs=8")[0], target)
    return target


def changed(folder: Path, change: Callable[[dict[str, Any]], object], tmp_path: Path) -> AutoparError:
    """What is said of the folder with a change of its program.json."""
    target = tmp_path / "changed"
    target.mkdir()
    for name in ("plan.json", "constants.safetensors", "weights"):
        (target / name).symlink_to(folder / name)
    data = json.loads((folder / "program.json").read_text())
    change(data)
    (target / "program.json").write_text(json.dumps(data))
    with pytest.raises(AutoparError) as caught:
        load_exported(target, blocks_of(folder))
    assert caught.value.hint
    return caught.value


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("state.model.norm.weight.shape", lambda data: data["state"]["model.norm.weight"].pop("shape")),
    ("there is no block 'layers'", lambda data: data["calls"][1].update(block="layers")),
    ("the function takes 13 arguments", lambda data: data["blocks"]["model_layers"].update(coordinates=[])),
    ("has no function 'other'", lambda data: data["blocks"]["part1"].update(function="other")),
    ("model_layers has 9 states, the call 8", lambda data: data["calls"][2]["state"].pop()),
    ("'model.layers.0' is no state, no input", lambda data: data["calls"].pop(1)),
    ("the program is for the mesh", lambda data: data.update(mesh="dp=2,fsdp=1,tp=1")),
    ("there is no tensor 'model.rotary_emb.phase'", lambda data: data["state"].update({"model.rotary_emb.phase": {**data["state"]["model.rotary_emb.inv_freq"], "kind": "constant"}})),
]  # fmt: skip


@pytest.mark.parametrize(("says", "change"), CHANGES)
def test_what_does_not_fit(
    says: str, change: Callable[[dict[str, Any]], object], folder: Path, tmp_path: Path
) -> None:
    assert says in str(changed(folder, change, tmp_path))


def test_weights_that_are_not_the_models(folder: Path, tmp_path: Path) -> None:
    blocks = blocks_of(folder)
    (tmp_path / "cut.safetensors").write_bytes(b"12345678 and no more")
    with pytest.raises(UsageError, match="the tensors cannot be read"):
        load_exported(folder, blocks, weights=tmp_path / "cut.safetensors")
    foreign = load_exported(folder, blocks, weights=folder / "constants.safetensors")
    with pytest.raises(TrainingError, match="the weights have no model"):
        simulate(2, lambda _: foreign.on_rank().start(), timeout_s=60)


def test_muon_is_refused(folder: Path) -> None:
    run = load_exported(folder, blocks_of(folder))
    with pytest.raises(UsageError, match="Muon goes by what the parameters are for"):
        simulate(2, lambda _: run.on_rank().start(optimizer=OptimizerSettings("muon")), timeout_s=60)


def test_a_name_does_not_become_code(tmp_path: Path) -> None:
    run, _ = compiled_layout("llama", "tp=2,mbs=8")
    name = 'x""" + __import__("os").abort() + """'
    plan = Plan.model_validate(
        {**run.plan.model_dump(), "model": {**run.plan.model.model_dump(), "name": name}}
    )
    again = run.on_rank()
    again.plan = plan
    export_python(again, tmp_path / "out", weights=False)
    assert '__import__("os")' not in (tmp_path / "out" / "train.py").read_text()


class Kept(nn.Module):
    """What it computes depends on how many labels count."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kept = labels >= 0
        return {"loss": nn.functional.cross_entropy(self.head(x[kept]), labels[kept])}


def _images() -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    model, batch = multimodal("llava")
    ids = batch["input_ids"].clone()
    ids[0, int((ids[0] == IMAGE).nonzero()[0])] = 5
    return model, batch, {**batch, "input_ids": ids}


def _kept() -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    labels = torch.tensor([[0, 3, -100], [2, -100, -100]])
    batch = {"x": torch.randn(2, 3, 8), "labels": labels}
    return Kept(), batch, {**batch, "labels": labels.clamp(min=0)}


@pytest.mark.parametrize("case", [pytest.param(_images, marks=pytest.mark.slow), _kept])
def test_what_must_hold_of_a_batch_is_checked(
    case: Callable[[], tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]], tmp_path: Path
) -> None:
    model, batch, other = case()
    run = api.compile(model, "cpu:1", batch)
    assert run.rank_program.conditions
    export_python(run, tmp_path / "out")
    again = load_exported(tmp_path / "out", blocks_of(tmp_path / "out"))
    assert equal(results(run, batch), results(again, batch))
    errors = []
    for each in (run, again):
        with pytest.raises(TrainingError) as caught:
            each.train_step(other)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_what_cannot_be_written() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    lambda_ = graph.call_function(lambda value: value, (x,))
    graph.output((lambda_,))
    block = RankBlock("block", GraphModule(nn.Module(), graph), (), (), ("x",), ("y",))
    with pytest.raises(UsageError, match="cannot be written as text"):
        block_source(block, Mesh.parse("tp=2"), ())


def test_infinities_defaults_and_names_that_are_taken() -> None:
    graph = Graph()
    tp, x = graph.placeholder("tp"), graph.placeholder("aten")
    filled = graph.call_function(torch.ops.aten.masked_fill.Scalar, (x, tp, float("-inf")))
    pieces = graph.call_function(torch.ops.aten.split_with_sizes.default, (filled, [1, 3], 0))
    graph.output((graph.call_function(operator.getitem, (pieces, 1)),))
    block = RankBlock("block", GraphModule(nn.Module(), graph), (), (), ("tp", "aten"), ("y",))
    text = block_source(block, Mesh.parse("tp=2"), ())
    space: dict[str, Any] = {}
    exec(compile(text, "block.py", "exec"), space)  # the text was made here
    mask, values = torch.tensor([True, False, True, False]), torch.arange(4.0)
    (result,) = space["block"](mask, values)
    assert result.tolist() == [1.0, float("-inf"), 3.0]
