"""Experts as one op: equal to Transformers' own loop for every class that has one, and one op in captured graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar.passes.transformers_experts as transformers_experts
from autopar.cost.compute import model_flops
from autopar.expert_functions import evaluate, experts
from autopar.passes.capture import capture
from autopar.passes.describe import describe
from autopar.passes.transformers_experts import use_one_op
from autopar.program import Program, node_info
from tests.passes.expert_classes import batch, build, classes, families
from tests.runtime.expert_cases import MODELS, captured

# One of each kind: plain; biases and columns in turn; transposed; without gate; a norm after; an activation with
# parameters of its own; clamped in several ways; experts that do nothing; one that is not decorated.
KINDS = [
    "mixtral", "gpt_oss", "aria", "nemotron_h", "muse_spark", "inkling2", "openai_privacy_filter", "minimax_m3_vl",
    "longcat_flash", "step3p7",
]  # fmt: skip


def check_family(family: str) -> None:
    for cls in classes(family):
        module = build(cls)
        other = copy.deepcopy(module)
        use_one_op(other)
        assert "forward" in vars(other), f"{cls.__name__} keeps its own forward"
        x, index, weights = batch(module)
        found, wanted = other(x, index, weights), module(x, index, weights)
        # some classes accumulate in float32, whatever they are given
        assert (found - wanted).norm() < 1e-6 * wanted.norm()
        slopes = [
            torch.autograd.grad(made.square().sum(), (x, weights, *of.parameters()), allow_unused=True)
            for made, of in ((found, other), (wanted, module))
        ]
        for mine, theirs in zip(*slopes, strict=True):
            if theirs is not None:
                assert mine is not None
                assert (mine - theirs).norm() <= 1e-5 * theirs.norm() + 1e-12


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op that torch.export sees has no gradient; the function that it stands for has."""
    monkeypatch.setattr(transformers_experts, "ONE_OP", experts)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("family", KINDS)
def test_experts_equal_the_loop_of_transformers(family: str) -> None:
    check_family(family)


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("family", [name for name in families() if name not in KINDS])
def test_experts_of_every_model_equal_the_loop_of_transformers(family: str) -> None:
    check_family(family)


def test_every_family_has_a_class_that_is_found() -> None:
    assert len(families()) >= 68
    assert all(classes(family) for family in families())


def expert_nodes(program: Program) -> list[tuple[str, torch.fx.Node]]:
    return [
        (block.name, node)
        for block in program.blocks.values()
        for node in block.op_nodes
        if node.target is experts
    ]


# jetmoe: per layer one op for the experts, and of attention's two slots a query and an output projection each.
# llama4 scales what goes in, so that each of a token's two slots is an op.
OPS = dict.fromkeys(MODELS, 1) | {"jetmoe": 5, "llama4": 2}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_has_one_op_on_unflattened_tokens(name: str) -> None:
    program = captured(name)[0]
    found = expert_nodes(program)

    for block in {block for block, _ in found}:
        assert sum(other == block for other, _ in found) == OPS[name]
    for _, node in found:
        infos = [node_info(operand) for operand in node.args[:3]]  # type: ignore[arg-type]
        assert [len(info.shape) for info in infos if info] == [3, 3, 3]


def test_layers_of_a_kind_are_one_block() -> None:
    program = captured("mixtral")[0]

    assert program.multiplicity["model_layers"] == 2


def test_text_of_an_expert_is_evaluated() -> None:
    gate, up = torch.randn(5, 3), torch.randn(5, 3)
    text = "a = clamp(gate, None, 7.0); b = mul.Tensor(a, sigmoid(mul.Tensor(a, 1.702))); mul.Tensor(add.Tensor(up, 1), b)"
    limited = gate.clamp(max=7.0)

    found = evaluate(text, {"gate": gate, "up": up})

    torch.testing.assert_close(found, (up + 1) * (limited * torch.sigmoid(limited * 1.702)))


class _Router(nn.Module):
    """Takes tokens flattened, counts them per expert over all tokens, and hands scores out flat."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4)
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        self.experts = MixtralExperts(config)
        self.gate = nn.Linear(8, 4)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rows = x.view(-1, x.shape[-1])
        scores = self.gate(rows).softmax(-1)
        weights, index = torch.topk(scores, 2)
        made = self.experts(rows, index, weights / weights.sum(-1, keepdim=True)).view(x.shape)
        chosen = torch.nn.functional.one_hot(index, 4).to(x.dtype).sum((0, 1))
        spread = torch.cumsum(scores, 0)  # mixes tokens: stays flat
        balance = (chosen * scores.mean(0)).sum()
        return {"loss": made.square().mean() + balance + spread.mean(), "scores": scores}


def test_tokens_that_are_mixed_stay_flat_and_all_values_are_the_same() -> None:
    torch.manual_seed(0)
    model, x = _Router().double(), torch.randn(3, 5, 8, dtype=torch.float64)
    program = capture(model, {"x": x}, outputs=("loss", "scores"))
    (call,) = program.calls
    state = dict(model.named_parameters())
    pieces = {name: info.piece for name, info in program.state.items()}

    def tensor(name: str) -> Tensor:
        piece = pieces[name]
        if piece is None:
            return state[name].detach()
        return state[piece.parameter].detach().narrow(piece.dim, piece.start, piece.stop - piece.start)

    block = program.blocks[call.block]
    found = block.graph(*[tensor(name) for name in call.state], *[x for _ in call.inputs])
    wanted = model(x)

    values = dict(zip(call.outputs, found, strict=True))
    for name, value in wanted.items():
        torch.testing.assert_close(values[program.outputs[name]], value.detach())


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "dbrx", "nemotron_h", "deepseek_v3"])
def test_workload_has_every_parameter_once(name: str) -> None:
    program, problem = captured(name)

    assert describe(program, problem).parameters == program.parameter_count


@pytest.mark.parametrize("name", ["mixtral", "dbrx", "nemotron_h", "deepseek_v3"])
def test_workload_has_every_product_once(name: str) -> None:
    program, problem = captured(name)
    workload = describe(program, problem)

    total = workload.flops_per_token() * workload.seq * problem.batch
    assert total == pytest.approx(3 * model_flops(problem), rel=1e-6)
