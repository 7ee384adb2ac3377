"""What one rank does for a command: generation and checks, from a model and options to lines of output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar import api
from autopar.errors import UsageError
from autopar.models.model_source import ModelSource
from autopar.models.source import find_model
from autopar.runtime.generate import check_prompts, generate
from autopar.runtime.groups import leave, wait_for_all
from autopar.verify import verify


def generate_rank(
    model: str,
    prompts: list[str],
    new_tokens: int,
    processes: int,
    folder: Path | None,
    as_json: bool,
    tell_result: Callable[[str], None],
) -> None:
    """What one rank does of `autopar generate`; rank 0 tells each prompt's continuation."""
    from transformers import AutoTokenizer

    source = find_model(model)
    if source.task not in ("causal-lm", "module"):
        raise UsageError(
            f"{source.name} ({source.task}) does not continue text", hint="a causal language model's folder"
        )
    if source.load is None:
        raise UsageError(f"{source.name} has no weights here, only a config", hint="a checkpoint folder")
    where = folder or source.path
    if where is None or not where.is_dir():
        raise UsageError(f"{source.name} has no tokenizer", hint="--tokenizer FOLDER")
    try:
        words: Any = AutoTokenizer.from_pretrained(str(where), local_files_only=True)
    except Exception as error:  # of many unrelated classes
        raise UsageError(
            f"the tokenizer cannot be read: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            where=str(where),
            hint="--tokenizer FOLDER, a folder with tokenizer.json",
        ) from error
    ids = [words(prompt)["input_ids"] for prompt in prompts]
    check_prompts(ids)
    length = max(map(len, ids)) + new_tokens
    most = getattr(source.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise UsageError(
            f"{max(map(len, ids))} prompt tokens and {new_tokens} new ones, {source.name} takes {most}",
            hint=f"--max-new-tokens {most - max(map(len, ids))}"
            if length - new_tokens < most
            else "a shorter prompt",
        )
    ranks = api.generator(source, processes, rows=len(ids), length=length)
    try:
        results = generate(ranks, ids, new_tokens=new_tokens, length=length, stop=_stop_tokens(source, words))
        if ranks.groups.rank == 0:
            for prompt, tokens in zip(prompts, results, strict=True):
                text = words.decode(tokens, skip_special_tokens=True)
                tell_result(
                    json.dumps({"prompt": prompt, "tokens": tokens, "text": text})
                    if as_json
                    else f"{prompt}{text}\n"
                )
        wait_for_all()
    finally:
        leave()


def verify_here(
    model: str, cluster: str, *, as_json: bool, tell_result: Callable[[str], None], **options: Any
) -> bool:
    """Tell what `verify` finds; whether it passed."""
    found = verify(model, cluster, **options)
    if as_json:
        tell_result(json.dumps({**asdict(found), "passed": found.passed}))
    else:
        tell_result(found.page())
    return found.passed


def _stop_tokens(source: ModelSource, words: Any) -> frozenset[int]:
    found = getattr(source.config, "eos_token_id", None)
    if found is None:
        found = words.eos_token_id
    return frozenset(found if isinstance(found, (list, tuple)) else [] if found is None else [int(found)])
