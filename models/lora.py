"""LoRA: a model with a small trained product beside each of some frozen matmuls, through PEFT.

In:  a ModelSource, and rank, alpha and targets. Out: a ModelSource whose module computes, at every target,
`W x + alpha / r * B (A x)`, with A [r, in] random and B [out, r] zero (Hu et al. 2021, section 4.1). Everything but A and
B is frozen. They are ordinary parameters of the module: captured, placed and trained as others are.

    q_proj.weight [out, in]  ->  q_proj.base_layer.weight [out, in]       frozen
                                 q_proj.lora_A.default.weight [r, in]     trained
                                 q_proj.lora_B.default.weight [out, r]    trained
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.errors import UsageError

from .model_source import ModelSource
from .source import find_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ADAPTER = "default"  # PEFT's name of the one adapter
ALL_LINEAR = "all-linear"
_HINT = "--lora r=16,alpha=32,targets=q_proj,v_proj"
_SWITCH: Mapping[str, bool] = {"true": True, "false": False}


@dataclass(frozen=True)
class Lora:
    """`rank` of the adapters; `alpha`: they count alpha / rank times (with `rslora`, alpha / sqrt(rank)); `targets`: names
    of modules, or their last words, or "all-linear"; none: PEFT's choice for the model type. `seed`: of A."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    rslora: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1 or not math.isfinite(self.alpha) or self.alpha <= 0:
            raise UsageError(
                f"LoRA of rank {self.rank} and alpha {self.alpha:g}: expected 1 or more, and a number above 0",
                hint=_HINT,
            )

    @staticmethod
    def parse(text: str, *, seed: int = 0) -> Lora:
        """Of `r=16,alpha=32,targets=q_proj,v_proj,rslora=true`, any of them left out. Raises UsageError."""
        found: dict[str, list[str]] = {}
        last = ""
        for word in (part.strip() for part in text.split(",")):
            name, equals, value = word.partition("=")
            if equals:
                if name not in ("r", "alpha", "targets", "rslora") or name in found:
                    raise UsageError(
                        f"--lora has {'a second' if name in found else 'an unknown'} {name!r}", hint=_HINT
                    )
                last, found[name] = name, [value]
            elif last == "targets" and word:
                found[last].append(word)
            else:
                raise UsageError(f"--lora does not read {word!r}", hint=_HINT)
        one = {name: values[0] for name, values in found.items() if name != "targets"}
        try:
            rank, alpha = int(one.get("r", "16")), float(one.get("alpha", "32"))
            rslora = _SWITCH[one.get("rslora", "false")]
        except (ValueError, KeyError):
            raise UsageError(
                f"--lora {text}: expected a whole number r, a number alpha, rslora true or false", hint=_HINT
            ) from None
        return Lora(rank, alpha, tuple(target for target in found.get("targets", ()) if target), rslora, seed)

    def __str__(self) -> str:
        targets = f",targets={','.join(self.targets)}" if self.targets else ""
        return f"r={self.rank},alpha={self.alpha:g}{',rslora=true' if self.rslora else ''}{targets}"


def with_lora(model: str | nn.Module | PretrainedConfig | ModelSource, lora: Lora) -> ModelSource:
    """The model with adapters at `lora.targets`, for `autopar.plan` and `autopar.compile`.

    What it builds raises UsageError where PEFT is not there, no module has such a name, or one is not a matmul.
    """
    source = model if isinstance(model, ModelSource) else find_model(model)
    load = source.load
    if load is not None and source.path is None:  # it gives the user's own module, which is not to be changed
        own = load

        def load() -> nn.Module:
            return copy.deepcopy(own())

    def adapted(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: inject(make(), lora, source.name)

    return replace(
        source,
        name=f"{source.name} with LoRA",
        build=adapted(source.build),
        load=None if load is None else adapted(load),
    )


def inject(module: nn.Module, lora: Lora, where: str) -> nn.Module:
    """Put adapters into a module, which is changed, and freeze the rest. The same on every rank, whatever the state of
    torch's random numbers."""
    peft = peft_module()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about transposed weights, which PEFT then takes care of itself
            adapted: nn.Module = peft.inject_adapter_in_model(peft_config(lora), module)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise _refused(module, lora, where, " ".join(str(error).split())[:300]) from error
    adapters = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    _check(adapters, adapted, lora, where)
    _draw(adapted, lora.seed)
    return adapted


def _check(adapters: list[str], module: nn.Module, lora: Lora, where: str) -> None:
    """Every target that was named has adapters, and all of them are of matmuls."""
    other = next((name for name in adapters if ".lora_A." not in name and ".lora_B." not in name), None)
    if other is not None:
        raise _refused(module, lora, where, f"{other} is not of a matmul")
    modules = {name.partition(".lora_")[0] for name in adapters}
    for target in lora.targets:
        if target != ALL_LINEAR and not any(f".{name}".endswith(f".{target}") for name in modules):
            raise _refused(module, lora, where, f"no module is called {target}")


def _refused(module: nn.Module, lora: Lora, where: str, why: str) -> UsageError:
    return UsageError(
        f"the model takes no LoRA adapters at {', '.join(lora.targets) or 'the usual places'}: {why}",
        where=where,
        hint=f"targets that are matmuls, such as {', '.join(_linear_names(module)[:6]) or 'none here'}",
    )


def peft_config(lora: Lora) -> Any:
    """PEFT's LoraConfig of it. Dropout is 0, as in all models here."""
    targets: Any = list(lora.targets) or None
    if lora.targets == (ALL_LINEAR,):
        targets = ALL_LINEAR
    return peft_module().LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        target_modules=targets,
        use_rslora=lora.rslora,
        lora_dropout=0.0,
        bias="none",
    )


def used_config(module: nn.Module) -> Any:
    """The LoraConfig of a module that `inject` made, its targets the modules' own names."""
    config: Any = module.peft_config[ADAPTER]  # type: ignore[index]
    return config


def peft_module() -> Any:
    """PEFT. Raises UsageError where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UsageError("LoRA needs PEFT", hint="pip install 'autopar[finetune]'") from error
    return peft


def _draw(module: nn.Module, seed: int) -> None:
    """A as PEFT draws it (Kaiming, uniform, a = sqrt 5) but from a generator of its own, B zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            continue
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
        elif ".lora_B." in name:
            nn.init.zeros_(parameter)


def _linear_names(module: nn.Module) -> list[str]:
    """Last words of the modules that adapters can go to."""
    found = [
        name.rpartition(".")[2]
        for name, part in module.named_modules()
        if (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D") and ".lora_" not in name
    ]
    return [name for name in dict.fromkeys(found) if name not in ("", "base_layer") and not name.isdigit()]
