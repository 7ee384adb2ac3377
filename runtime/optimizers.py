"""Optimizers by name, over a rank's shares, with settings by the names of parameters.

In:  OptimizerSettings, a ParameterStore, the rank programs it holds the state of.
Out: one torch Optimizer; its groups differ in settings, its parameters are the store's.

    OptimizerSettings("muon", lr=3e-4, weight_decay=0.1, groups=[parse_group("*.bias lr=1e-4")])

An optimizer that treats every element on its own (AdamW, SGD and their like) gives on shares what it gives on whole
parameters. Muon and Adafactor do not: `whole_optimizers.py` has them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import UsageError
from autopar.passes.lower import RankProgram
from autopar.passes.roles import Roles, roles
from autopar.runtime.store import Entry, ParameterStore
from autopar.runtime.whole_optimizers import Adafactor, Muon, Together

# torch's optimizers whose update of an element looks at that element alone.
ELEMENTWISE: Mapping[str, type[Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    )
}
OPTIMIZERS = ("adamw", "sgd", "muon", "adafactor", *sorted(set(ELEMENTWISE) - {"adamw", "sgd"}))

# What Muon is set to unless told otherwise: with this rule one learning rate serves its matrices and AdamW's vectors
# (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2).
MUON = {"adjust_lr_fn": "match_rms_adamw"}

Decay = Literal["matrices", "all"]


@dataclass(frozen=True)
class GroupSettings:
    """Settings of the parameters whose name matches `pattern`: the model's own name, or that of a piece of a packed
    parameter. `*` and `?` are as in file names, brackets are themselves. `optimizer` names another optimizer for them."""

    pattern: str
    settings: Mapping[str, Any]

    def matches(self, entry: Entry) -> bool:
        pattern = self.pattern.replace("[", "[[]")
        return any(fnmatchcase(name, pattern) for name in (entry.name, entry.layout.info.source(entry.name)))


@dataclass(frozen=True)
class OptimizerSettings:
    """`name`: one of OPTIMIZERS. `lr`: of the step the schedule calls 1.

    `weight_decay` is of matrices and tensors of more dims that are not biases ("matrices"), or of all parameters
    ("all"). Norms and biases are vectors: pulling them to zero regularises nothing (as in GPT-2's and Transformers'
    training). `options`: what else the optimizer takes, by torch's names (`momentum`, `betas`, `eps`, `fused`). Of
    "muon" they are Muon's; what is no matrix between embedding and head takes AdamW with torch's defaults.
    `groups`: the later ones win.
    """

    name: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.0
    decay: Decay = "matrices"
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[GroupSettings, ...] = ()

    def __post_init__(self) -> None:
        _kind(self.name)  # a name that does not exist is told where it is given, not later by every rank


def parse_group(text: str) -> GroupSettings:
    """`PATTERN key=value,key=value`, as in `*.bias lr=1e-4,weight_decay=0`. Raises UsageError."""
    pattern, _, settings = text.strip().rpartition(" ")
    if not pattern:
        raise UsageError(
            f"{text!r} has no pattern, or no settings", where="group", hint="'*.bias lr=1e-4,weight_decay=0'"
        )
    # A comma parts two settings where a setting follows it: betas=(0.9,0.95) has one of its own.
    return GroupSettings(pattern.strip(), parse_options(re.split(r",(?=\s*\w+\s*=)", settings)))


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts; values as Python writes them, other words as they are. Raises UsageError."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UsageError(f"{text!r} is not a setting", where="optimizer", hint="lr=1e-4")
        try:
            found[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            found[key.strip()] = value.strip()
    return found


def make_optimizer(
    settings: OptimizerSettings, store: ParameterStore, *programs: RankProgram, known: Iterable[str] = ()
) -> Optimizer:
    """The optimizer over a store's trainable parameters (over nothing, if it has none). Every rank must make it, with the
    same settings.

    `programs`: the whole one, or all that the store holds the state of. `known`: names of parameters that other ranks
    hold (of other pipeline stages), for which a pattern may be meant.

    Raises UsageError for a name, a setting or a pattern that nothing has.
    """
    entries = [entry for entry in store.entries.values() if entry.parameter.requires_grad]
    _check_patterns(settings, entries, known)
    if not entries:  # a pipeline stage whose parameters are all frozen
        return torch.optim.SGD([nn.Parameter(torch.zeros(0))], lr=settings.lr)
    found = roles(*programs)
    groups: dict[tuple[str, str], tuple[dict[str, Any], list[nn.Parameter]]] = {}
    for entry in entries:
        kind, chosen = _settings_of(entry, settings, found)
        # Settings may be lists, which have no hash.
        key = (kind, repr(sorted(chosen.items())))
        groups.setdefault(key, (chosen, []))[1].append(entry.parameter)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for (kind, _), (chosen, parameters) in groups.items():
        by_kind.setdefault(kind, []).append({"params": parameters, **chosen})
    made = [_make(kind, of_kind, settings, store) for kind, of_kind in by_kind.items()]
    return made[0] if len(made) == 1 else Together(made)


def _settings_of(entry: Entry, settings: OptimizerSettings, found: Roles) -> tuple[str, dict[str, Any]]:
    """The optimizer of a parameter, and the settings of its group."""
    given: dict[str, Any] = {}
    for group in settings.groups:
        if group.matches(entry):
            given.update(group.settings)
    kind = _kind(str(given.pop("optimizer", settings.name)))
    if kind == "muon" and not _is_hidden_matrix(entry, found):
        kind = "adamw"
    decays = settings.decay == "all" or _decays(entry)
    chosen = {"lr": settings.lr, "weight_decay": settings.weight_decay if decays else 0.0}
    if kind == _kind(settings.name):
        chosen.update(settings.options)
    return kind, {**chosen, **given}


def _is_hidden_matrix(entry: Entry, found: Roles) -> bool:
    return (
        len(entry.layout.info.shape) == 2
        and entry.name in found.matrices
        and entry.name not in found.embeddings | found.heads
    )


def _decays(entry: Entry) -> bool:
    """Not vectors, and not the biases of experts, which are the rows of a matrix."""
    info = entry.layout.info
    return len(info.shape) >= 2 and not info.source(entry.name).endswith("bias")


def _check_patterns(settings: OptimizerSettings, entries: list[Entry], known: Iterable[str]) -> None:
    elsewhere = list(known)
    for group in settings.groups:
        pattern = group.pattern.replace("[", "[[]")
        if not any(map(group.matches, entries)) and not any(fnmatchcase(name, pattern) for name in elsewhere):
            raise UsageError(
                f"no trainable parameter is called {group.pattern!r}",
                where="group",
                hint=f"a name such as {entries[0].name}, with * for any part of it" if entries else None,
            )


def _kind(name: str) -> str:
    lower = name.lower()
    if lower not in OPTIMIZERS:
        torchs = getattr(torch.optim, name, None)
        why = " on shares of parameters" if isinstance(torchs, type) and issubclass(torchs, Optimizer) else ""
        raise UsageError(
            f"there is no optimizer {name!r}{why}",
            where="optimizer",
            hint=f"one of {', '.join(OPTIMIZERS)}; in Python any torch Optimizer over the shares",
        )
    return lower


def _make(
    kind: str, groups: list[dict[str, Any]], settings: OptimizerSettings, store: ParameterStore
) -> Optimizer:
    # The keys of a group that its optimizer does not know would be kept in silence.
    makers: dict[str, Callable[..., Optimizer]] = {
        "muon": torch.optim.Muon,
        "adafactor": torch.optim.Adafactor,
        **ELEMENTWISE,
    }
    allowed = set(inspect.signature(makers[kind]).parameters) - {"params"}
    given = {key for group in groups for key in group} - {"params"}
    surplus = sorted(given - allowed)
    if surplus == ["weight_decay"] and not any(group["weight_decay"] for group in groups):
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    elif surplus:
        raise UsageError(
            f"{kind} has no setting {surplus[0]!r}",
            where="optimizer",
            hint=f"one of {', '.join(sorted(allowed))}",
        )
    try:
        _try_settings(makers[kind], groups)
        if kind == "muon":
            return Muon([{**MUON, **group} for group in groups], store)
        if kind == "adafactor":
            return Adafactor(groups, store)
        fused = {"fused": True} if "fused" in allowed and not given & {"fused", "foreach"} else {}
        return makers[kind](groups, **fused)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"{kind} refuses its settings: {str(error).splitlines()[0]}",
            where="optimizer",
            hint=f"other values of {', '.join(sorted(given))}",
        ) from error


def _try_settings(maker: Callable[..., Optimizer], groups: Iterable[Mapping[str, Any]]) -> None:
    """torch checks the settings given to the constructor, not those of groups."""
    for group in groups:
        maker(
            [nn.Parameter(torch.zeros(1, 1))],
            **{key: value for key, value in group.items() if key != "params"},
        )
