"""The published models that ship as facts: `published/NAME.json`, one file each.

    {"title", "task", "model_type", "aliases": [...], "config": {...}, "parameters": 8030261248,
     "sources": {...}}

`config` holds the keyword values of the Transformers config of that `model_type`; `parameters` is the count
that its authors publish, to check the config by. Adding a model is adding a file. Needs no torch.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autopar.errors import ModelError

FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True)
class Published:
    """The facts of one published model; `parameters` is the published count."""

    name: str
    title: str
    task: str
    model_type: str
    aliases: tuple[str, ...]
    config: dict[str, Any]
    parameters: int
    sources: dict[str, str]


def published_names() -> tuple[str, ...]:
    """The canonical names, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def published(name: str) -> Published:
    """The facts of a model by its name, an alias or its hub id, in any case; ModelError if there is none."""
    canonical = canonical_name(name)
    if canonical is None:
        raise unknown_model(name)
    return _read(canonical)


def canonical_name(name: str) -> str | None:
    """The canonical name behind a name, an alias or a hub id, or None."""
    return _names().get(name.strip().lower())


def unknown_model(spec: str) -> ModelError:
    """The error for a spec that names neither a published model nor anything on disk."""
    close = difflib.get_close_matches(spec.strip().lower(), list(_names()), n=3, cutoff=0.6)
    canonical = list(dict.fromkeys(_names()[name] for name in close))
    hint = f"{' or '.join(canonical)}; " if canonical else ""
    if spec.count("/") == 1 and not spec.startswith((".", "/", "~")) and all(spec.split("/")):
        hint += (
            f"a local folder: autopar never downloads; `hf download {spec} --local-dir FOLDER` first "
            "and give FOLDER; "
        )
    hint += "one of " + ", ".join(published_names())
    hint += "; or a checkpoint folder, a .gguf file, or file.py:function"
    return ModelError(
        f"{spec!r} is neither a published model nor a checkpoint folder, a .gguf file or file.py:function",
        hint=hint,
    )


@cache
def _read(name: str) -> Published:
    facts = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    facts["aliases"] = tuple(facts["aliases"])
    return Published(name=name, **facts)


@cache
def _names() -> dict[str, str]:
    names: dict[str, str] = {}
    for name in published_names():
        for known in (name, *_read(name).aliases):
            assert known.lower() not in names, f"{known} names two published models"
            names[known.lower()] = name
    return names
