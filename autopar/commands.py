"""What one rank does for a command: the training loop and generation, from a plan and options to lines of output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar import api
from autopar.data import Stream, TokenStore
from autopar.data.prepare import tokenizer_fingerprint
from autopar.errors import UsageError
from autopar.models.model_source import ModelSource
from autopar.models.source import find_model
from autopar.models.text import batch_at, pydoc_tokens, text_file_tokens
from autopar.plans import Plan
from autopar.runtime.checkpoint import has_checkpoint
from autopar.runtime.generate import check_prompts, generate
from autopar.runtime.groups import leave, wait_for_all
from autopar.verify import verify


@dataclass(frozen=True)
class TrainOptions:
    """Options of `autopar train` that are not the plan's. `steps`: the step to train up to; `save_every` 0: only at
    the end; `max_norm` 0: gradients are not clipped."""

    steps: int
    lr: float
    weight_decay: float
    max_norm: float
    data: str
    tokenizer: Path | None
    seed: int
    out: Path | None
    save_every: int
    resume: bool
    compiled: bool
    timeout_s: float
    as_json: bool
    quiet: bool


def train_rank(model: str, plan: Plan, options: TrainOptions, tell_result: Callable[[str], None]) -> None:
    """Train up to `options.steps`, from the checkpoint if asked; rank 0 tells a line per step."""
    out = options.out
    source = find_model(model)
    batch_of = _batches(source, plan, options)
    torch.manual_seed(options.seed)  # every rank builds the same random weights, where a model has no others
    run = api.compile(source, plan=plan, compiled=options.compiled)
    run.start(
        lr=options.lr,
        weight_decay=options.weight_decay,
        max_norm=options.max_norm or None,
        timeout_s=options.timeout_s,
    )
    trainer = run.trainer
    first = trainer.model.groups.rank == 0

    def say(text: str) -> None:
        if first and not options.quiet:
            print(text, file=sys.stderr, flush=True)

    try:
        if options.resume and out is not None:
            if has_checkpoint(out):
                run.load(out)
                say(f"going on from the checkpoint of step {trainer.step_count} in {out}")
            else:
                say(f"there is no checkpoint in {out} yet: starting at step 0")
        if trainer.step_count >= options.steps:
            say(f"nothing to do: the checkpoint is of step {trainer.step_count}, --steps is {options.steps}")
            return
        while trainer.step_count < options.steps:
            began = time.perf_counter()
            result = run.train_step(batch_of(trainer.step_count))
            seconds = time.perf_counter() - began
            if first:
                tell_result(
                    _step_line(result.step, result.loss, result.gradient_norm, seconds, plan, options.as_json)
                )
            if (
                out is not None
                and options.save_every
                and result.step % options.save_every == 0
                and result.step < options.steps
            ):
                run.save(out)
        if out is not None:
            run.save(out)
            if first:
                plan.save(out / "plan.json")
            say(f"checkpoint written to {out}")
        wait_for_all()
    finally:
        leave()


def _step_line(step: int, loss: float, norm: float, seconds: float, plan: Plan, as_json: bool) -> str:
    if as_json:
        return json.dumps({"step": step, "loss": loss, "gradient_norm": norm, "seconds": seconds})
    tokens = plan.data.batch * plan.data.seq / seconds
    return f"step {step:4d}  loss {loss:.6f}  gradient norm {norm:8.4f}  {seconds:6.2f} s  {tokens:8.0f} tokens/s"


def _batches(source: ModelSource, plan: Plan, options: TrainOptions) -> Callable[[int], dict[str, Tensor]]:
    """Step -> whole batch: text for language models, the source's example (the same each step) for others."""
    batch, seq = plan.data.batch, plan.data.seq
    data, tokenizer, seed = options.data, options.tokenizer, options.seed
    if source.task not in ("causal-lm", "seq2seq", "masked-lm"):
        if data != "pydoc" or tokenizer is not None:
            raise UsageError(
                f"--data and --tokenizer are for language models; {source.name} is trained on its own example",
                hint="to leave them out, or autopar.compile(...).train_step(batch) in Python",
            )
        example = source.example_inputs(batch, seq)
        return lambda step: example
    if tokenizer is not None and not tokenizer.is_dir():
        raise UsageError(
            "there is no such tokenizer folder", where=str(tokenizer), hint="a folder with tokenizer.json"
        )
    vocabulary = int(getattr(source.config, "vocab_size", 256))
    folder = tokenizer or source.path
    if Path(data).is_dir():
        stream = _prepared(Path(data), plan, folder, vocabulary, seed)
        return lambda step: stream.at(step * batch)
    if folder is not None and folder.is_dir():
        tokens = pydoc_tokens(folder) if data == "pydoc" else text_file_tokens(Path(data), folder)
        if len(tokens) and int(tokens.max()) >= vocabulary:
            raise UsageError(
                f"the tokenizer gives token {int(tokens.max())}, the model has a vocabulary of {vocabulary}",
                where=str(folder),
                hint="the tokenizer that belongs to the model",
            )
    else:  # no tokenizer: bytes are tokens
        try:
            text = _pydoc_text() if data == "pydoc" else Path(data).read_bytes()
        except OSError as error:
            raise UsageError(
                f"the text cannot be read: {error.strerror}", where=data, hint="a text file that exists"
            ) from None
        tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64)) % vocabulary
    batch_at(
        tokens, batch, seq, seed=seed, step=0
    )  # a text that is too short is told before the model is built
    return lambda step: batch_at(tokens, batch, seq, seed=seed, step=step)


def _prepared(data: Path, plan: Plan, tokenizer: Path | None, vocabulary: int, seed: int) -> Stream:
    """A folder that `autopar prepare` wrote, if its tokens are those of this model."""
    store = TokenStore(data)
    if tokenizer is not None and tokenizer.is_dir() and tokenizer_fingerprint(tokenizer) != store.tokenizer:
        raise UsageError(
            "the tokens were made with another tokenizer than the model's",
            where=f"{data} and {tokenizer}",
            hint="autopar prepare with this tokenizer, or --tokenizer with the one they were made with",
        )
    if store.vocabulary > vocabulary:
        raise UsageError(
            f"the tokens are of a vocabulary of {store.vocabulary}, the model has {vocabulary}",
            where=str(data),
            hint="the tokenizer that belongs to the model",
        )
    return Stream(store, batch=plan.data.batch, seq=plan.data.seq, seed=seed)


def _pydoc_text() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


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
