"""Every class of experts in Transformers, as a small module of its own with random weights."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

TOKENS, SHARE = 9, 2
_MODELS = Path(transformers.__file__).parent / "models"
# The names under which configs say how wide experts are and how many.
_SIZES = {
    "hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 12, "expert_ffn_hidden_size": 12,
    "moe_hidden_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "zero_expert_num": 2, "moe_latent_size": None, "swiglu_limits": None,
}  # fmt: skip


@cache
def families() -> tuple[str, ...]:
    """The model types whose file has experts behind Transformers' protocol."""
    found = [
        file for file in _MODELS.glob("*/modeling_*.py") if "@use_experts_implementation" in file.read_text()
    ]
    return tuple(sorted({file.parent.name for file in found} | {"step3p7", "longcat_flash"}))


def classes(family: str) -> list[type[nn.Module]]:
    file = next((_MODELS / family).glob("modeling_*.py"))
    module = importlib.import_module(f"transformers.models.{family}.{file.stem}")
    own = [
        item
        for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, nn.Module) and item.__module__ == module.__name__
    ]
    named = [item for item in own if item.__name__ in ("LongcatFlashExperts", "Step3p7Experts")]
    return [item for item in own if "_apply_gate" in dir(item)] + named


def build(cls: type[nn.Module]) -> nn.Module:
    """The class with one of its file's configs, shrunk; double precision, Transformers' own loop over experts."""
    module = importlib.import_module(cls.__module__)
    reasons = []
    for item in vars(module).values():
        if not (inspect.isclass(item) and issubclass(item, transformers.PreTrainedConfig)):
            continue
        try:
            config = item()
            for name, size in _SIZES.items():
                if hasattr(config, name):
                    kept = getattr(config, name)
                    setattr(config, name, [size] * len(kept) if isinstance(kept, (list, tuple)) else size)
            config._experts_implementation = "eager"
            torch.manual_seed(0)
            made = cls(config).double()
        except Exception as error:  # a config of another part of the model
            reasons.append(f"{item.__name__}: {error}")
            continue
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
        return made
    raise RuntimeError("; ".join(reasons))


def batch(experts: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """x [9, d], index [9, 2], weights [9, 2]: expert 1 gets no token."""
    down = experts.down_proj
    assert isinstance(down, Tensor)
    width = down.shape[-1] if getattr(experts, "is_transposed", False) else down.shape[-2]
    torch.manual_seed(1)
    x = torch.randn(TOKENS, width, dtype=torch.float64, requires_grad=True)
    count = down.shape[0] + int(getattr(experts, "zero_expert_num", 0))
    allowed = torch.tensor([number for number in range(count) if number != 1])
    index = torch.stack([allowed[torch.randperm(len(allowed))[:SHARE]] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, SHARE, dtype=torch.float64, requires_grad=True)
    return x, index, weights
