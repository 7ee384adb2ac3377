"""Greedy generation from a captured forward, on one process or several.

In:  a module whose forward gives `logits`, prompts as token ids.
Out: for each prompt the new tokens.

There is no key/value cache here: every token runs the whole (statically shaped) row again, which is exact and needs
nothing of the model but its forward. Rows are padded on the right; under causal attention what follows a token
cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.runtime.groups import peer_errors
from autopar.runtime.model import RankModel


class NextToken(nn.Module):
    """Logits [batch, vocabulary] of the token after position `last[i]` of row i."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, last: Tensor) -> dict[str, Tensor]:
        result: Any = self.model(input_ids=input_ids)
        logits = result["logits"] if isinstance(result, dict) else result[0]
        rows = torch.arange(input_ids.shape[0], device=input_ids.device)
        return {"logits": logits[rows, last].float()}


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raise UsageError unless there is a prompt, and each has a token: a model continues text, it starts none."""
    if not prompts:
        raise UsageError("there is no prompt", hint="one prompt or more")
    empty = next((number for number, prompt in enumerate(prompts, 1) if not len(prompt)), None)
    if empty is not None:
        raise UsageError(
            "a prompt has no tokens", where=f"prompt {empty}", hint="a prompt of at least one token"
        )


def generate(
    model: RankModel,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    length: int,
    stop: frozenset[int] = frozenset(),
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt greedily by up to `new_tokens` tokens, ending a row after a token in `stop`.

    `length`: the row length the model was captured with. `on_token(row, token)` is called as tokens come.
    """
    check_prompts(prompts)
    longest = max(len(prompt) for prompt in prompts)
    if longest + new_tokens > length:
        raise UsageError(
            f"{longest} prompt tokens and {new_tokens} new ones do not fit in {length}",
            hint="a longer row, or fewer new tokens",
        )
    rows = torch.zeros(len(prompts), length, dtype=torch.int64)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    for row, prompt in enumerate(prompts):
        rows[row, : len(prompt)] = torch.tensor(prompt)
    results: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    with torch.no_grad(), peer_errors("generation"):
        for _ in range(new_tokens):
            outputs = model(model.local_inputs({"input_ids": rows, "last": last}))
            tokens = outputs["logits"].argmax(-1).cpu()
            for row in sorted(running):
                token = int(tokens[row])
                results[row].append(token)
                last[row] += 1
                rows[row, last[row]] = token
                if on_token is not None:
                    on_token(row, token)
                if token in stop:
                    running.discard(row)
            if not running:
                break
    return results
