"""Text as tokens, and the batches cut from it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from autopar.errors import ModelError, UsageError
from autopar.models.text import batch_at, batches, pydoc_tokens, text_file_tokens


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_text_file_becomes_a_row_of_tokens(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("the cat\nthe dog")
    assert text_file_tokens(tmp_path / "data.txt", tokenizer_folder).tolist() == [0, 1, 0, 2]


def test_the_help_texts_are_kept_and_read_back(tokenizer_folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = pydoc_tokens(tokenizer_folder, cache)
    (kept,) = cache.iterdir()
    stamp = kept.stat().st_mtime_ns
    again = pydoc_tokens(tokenizer_folder, cache)
    assert torch.equal(first, again)
    assert first.dtype == again.dtype == torch.int64
    assert kept.stat().st_mtime_ns == stamp
    assert torch.equal(first, pydoc_tokens(tokenizer_folder))


def test_another_tokenizer_does_not_get_the_kept_tokens(tokenizer_folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = pydoc_tokens(tokenizer_folder, cache)
    file = tokenizer_folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"the": 0', '"the": 1').replace('"cat": 1', '"cat": 0'))
    assert not torch.equal(first, pydoc_tokens(tokenizer_folder, cache))


def test_a_batch_is_cut_from_the_text() -> None:
    batch = batch_at(torch.arange(100), 4, 8, seed=0, step=3)
    rows = batch["input_ids"]
    assert rows.shape == (4, 8)
    assert torch.equal(rows, rows[:, :1] + torch.arange(8))
    assert torch.equal(batch["labels"], rows)
    assert batch["labels"] is not rows


def test_a_run_that_starts_later_sees_the_same_batches() -> None:
    tokens = torch.arange(1000)
    whole = [b["input_ids"] for b in batches(tokens, 2, 8, seed=1, steps=6)]
    resumed = [b["input_ids"] for b in batches(tokens, 2, 8, seed=1, steps=6, start=4)]
    assert torch.equal(torch.stack(whole[4:]), torch.stack(resumed))


def test_steps_and_seeds_give_different_batches() -> None:
    tokens = torch.arange(10_000)
    cut = [
        batch_at(tokens, 2, 8, seed=seed, step=step)["input_ids"] for seed in range(3) for step in range(3)
    ]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(cut, 2))


def test_batches_leave_the_global_seed_alone() -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    batch_at(torch.arange(100), 2, 8, seed=0, step=0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_text_as_long_as_the_sequence_is_enough_and_a_shorter_one_is_not() -> None:
    assert batch_at(torch.arange(8), 1, 8, seed=0, step=0)["input_ids"].tolist() == [list(range(8))]
    with pytest.raises(UsageError, match=r"7 tokens.*\n  try more text"):
        batch_at(torch.arange(7), 1, 8, seed=0, step=0)


def test_a_missing_tokenizer_is_explained(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("the cat")
    with pytest.raises(ModelError, match=r"\n  try a checkpoint folder with tokenizer\.json"):
        text_file_tokens(tmp_path / "data.txt", tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"  \n", b"\xff\xfe\x00"])
def test_a_text_that_cannot_be_used_is_explained(tokenizer_folder: Path, content: bytes | None) -> None:
    file = tokenizer_folder / "data.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match="\n  try "):
        text_file_tokens(file, tokenizer_folder)
