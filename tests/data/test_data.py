"""Data: every document's tokens once per epoch, in an order that depends on nothing but seed and place."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.data import Ahead, Order, Stream, TokenStore, prepare
from autopar.data.store import write_about
from autopar.errors import TrainingError, UsageError
from autopar.training_data import check_data
from tests.words import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def lines(path: Path, items: list[object]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def words(first: int, count: int) -> str:
    return " ".join(f"w{i % 200}" for i in range(first, first + count))


@pytest.fixture(scope="module")
def store(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("data")
    source = lines(folder / "a.jsonl", [{"text": words(7 * n, 5 + n % 23)} for n in range(200)])
    return prepare([source], tokenizer=tokenizer, out=folder / "tokens", shard_tokens=700)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    order = Order(samples, seed)
    found = order.at(epoch * samples, samples)
    assert sorted(found.tolist()) == list(range(samples))
    middle = order.at(epoch * samples + samples // 3, samples)  # across an epoch's end
    assert middle[: samples - samples // 3].tolist() == found[samples // 3 :].tolist()


def test_epochs_and_seeds_differ() -> None:
    order = Order(1000, 1)
    first = order.at(0, 1000)
    assert (first != order.at(1000, 1000)).mean() > 0.99
    assert (first != Order(1000, 2).at(0, 1000)).mean() > 0.99
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.1
    assert Order(7, shuffle=False).at(5, 5).tolist() == [5, 6, 0, 1, 2]


def test_shards_hold_every_token(store: TokenStore) -> None:
    assert store.documents == 200
    assert len(store.about["shards"]) > 3
    tokens, trained = store.read(0, store.tokens)
    assert trained.all()
    assert (tokens == 0).sum() == 200  # one end per document
    assert (np.flatnonzero(tokens == 0) + 1).tolist() == store.starts[1:].tolist()
    for first, count in ((0, 1), (695, 20), (store.tokens - 3, 3)):
        assert store.read(first, count)[0].tolist() == tokens[first : first + count].tolist()
    store.verify()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_see_the_rows_that_one_would(store: TokenStore, ranks: int) -> None:
    stream = Stream(store, batch=8, seq=16, seed=3)
    for step in range(12):
        whole = stream.at(step * 8)
        rows = 8 // ranks
        pieces = [
            stream.at(step * 8, range(rank * rows, (rank + 1) * rows))["input_ids"] for rank in range(ranks)
        ]
        assert torch.equal(torch.cat(pieces), whole["input_ids"])


def test_resuming_in_the_middle_of_an_epoch_loses_and_repeats_nothing(store: TokenStore) -> None:
    stream = Stream(store, batch=6, seq=16, seed=5)
    steps = -(-2 * stream.samples // 6)
    straight = [batch["input_ids"] for batch, _ in zip(stream.from_position(0), range(steps), strict=False)]
    position, resumed = 0, []
    for batch, count in (
        (6, 5),
        (2, 4),
        (12, 3),
        (6, steps),
    ):  # other batches too: the position is what counts
        again = Stream(store, batch=batch, seq=16, seed=5)
        for item, _ in zip(again.from_position(position), range(count), strict=False):
            resumed.append(item["input_ids"])
            position += batch
    one, other = torch.cat(straight), torch.cat(resumed)
    assert torch.equal(one, other[: len(one)])
    first = {tuple(row) for row in one[: stream.samples].tolist()}
    tokens, _ = store.read(0, stream.samples * 16)
    assert first == {tuple(row) for row in tokens.reshape(-1, 16).tolist()}


def test_documents_are_kept_apart(store: TokenStore) -> None:
    stream = Stream(store, batch=4, seq=24, documents=True, shuffle=False)
    batch = stream.at(0)
    for row in range(4):
        for place in range(24):
            starts = row * 24 + place in set(store.starts.tolist())
            if starts and place:
                assert batch["labels"][row, place] == -100
            if starts:
                assert batch["position_ids"][row, place] == 0
            elif place:
                assert batch["position_ids"][row, place] == batch["position_ids"][row, place - 1] + 1


def test_whole_documents_fill_rows(store: TokenStore) -> None:
    stream = Stream(store, batch=stream_rows(store), seq=20, packing="whole", shuffle=False)
    batch = stream.at(0)
    counted = int((batch["labels"] != -100).sum())
    lengths = np.minimum(np.diff(store.starts), 20)
    rows = stream.samples
    assert stream.cut_off == int((np.diff(store.starts) > 20).sum())
    assert counted == int(lengths.sum()) - (
        store.documents - rows
    )  # but the first of each document inside a row


def stream_rows(store: TokenStore) -> int:
    return Stream(store, batch=1, seq=20, packing="whole").samples


def test_only_the_assistant_is_trained_on(tokenizer: Path, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": " w1 w2 "},
        {"role": "assistant", "content": " w3 "},
        {"role": "user", "content": " w4 "},
        {"role": "assistant", "content": " w5 w6 "},
    ]
    store = prepare(
        [lines(tmp_path / "a.jsonl", [{"messages": talk}])], tokenizer=tokenizer, out=tmp_path / "t"
    )
    tokens, trained = store.read(0, store.tokens)
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(tokenizer).convert_ids_to_tokens(tokens[trained].tolist())
    assert text == ["w3", "<end>", "w5", "w6", "<end>", "<eos>"]


def spoken(store: TokenStore, tokenizer: Path, ids: list[int]) -> list[str]:
    from transformers import AutoTokenizer

    found: list[str] = AutoTokenizer.from_pretrained(tokenizer).convert_ids_to_tokens(ids)
    return found


def test_labels_of_conversations_are_the_assistants_words(tokenizer: Path, tmp_path: Path) -> None:
    """With a system's prompt, several turns, a turn of the user at the end; as rows that the model is given."""
    system = {"role": "system", "content": " w9 w9 "}
    talks = [
        [system, {"role": "user", "content": " w1 "}, {"role": "assistant", "content": " w2 w3 "}],
        [
            {"role": "user", "content": " w4 "},
            {"role": "assistant", "content": " w5 "},
            {"role": "user", "content": " w6 "},
            {"role": "assistant", "content": " w7 "},
            {"role": "user", "content": " w8 "},
        ],
    ]
    source = lines(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])
    store = prepare([source], tokenizer=tokenizer, out=tmp_path / "t")
    stream = Stream(store, batch=2, seq=16, packing="whole", shuffle=False)
    assert stream.samples == 2
    batch = stream.at(0)
    trained = [
        spoken(store, tokenizer, [int(label) for label in row if label != -100]) for row in batch["labels"]
    ]
    assert trained == [["w2", "w3", "<end>", "<eos>"], ["w5", "<end>", "w7", "<end>", "<eos>"]]
    counted = batch["labels"] != -100
    assert torch.equal(batch["labels"][counted], batch["input_ids"][counted])
    first = spoken(store, tokenizer, batch["input_ids"][0][:11].tolist())
    assert first == [
        "<system>",
        "w9",
        "w9",
        "<end>",
        "<user>",
        "w1",
        "<end>",
        "<assistant>",
        "w2",
        "w3",
        "<end>",
    ]


def test_conversations_that_no_template_takes_are_told(tokenizer: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": " w1 "}, {"role": "assistant", "content": " w2 "}]
    source = lines(tmp_path / "a.jsonl", [{"messages": talk}])

    def with_template(name: str, template: str | None) -> object:
        made = save_tokenizer(tmp_path / name, template=template)
        return lambda: prepare([source], tokenizer=made, out=tmp_path / f"{name} tokens")

    fails("no chat template", with_template("none", None))
    fails(
        "does not take the conversation: .*no users",
        with_template("raises", "{{ raise_exception('no users') }}"),
    )
    counting = "w{{ messages | length }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
    fails("changes what the template wrote", with_template("counting", counting))


def test_parquet_text_and_folders(tokenizer: Path, tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("w1 w2 w3")
    parquet.write_table(arrow.table({"body": ["w4", "w5 w6"]}), source / "b.parquet")
    store = prepare([source], tokenizer=tokenizer, out=tmp_path / "t", field="body")
    assert store.documents == 3
    assert store.tokens == 6 + 3


def test_waiting_is_measured(store: TokenStore) -> None:
    stream = Stream(store, batch=4, seq=16)
    for _ in zip(stream.from_position(0), range(3), strict=False):
        pass
    assert 0 <= stream.waited.last_s <= stream.waited.total_s < 5


def fails(match: str, call: object) -> None:
    assert callable(call)
    with pytest.raises(UsageError, match=match) as caught:
        call()
    assert caught.value.hint


def test_bad_data_is_told(store: TokenStore, tokenizer: Path, tmp_path: Path) -> None:
    def made(*sources: Path, **options: object) -> object:
        return lambda: prepare(sources, tokenizer=tokenizer, out=tmp_path / "out", **options)  # type: ignore[arg-type]

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "w1"}\nnot json\n')
    fails("not JSON", made(bad))
    fails("no text under", made(lines(tmp_path / "c.jsonl", [{"body": "w1"}])))
    fails("no such file", made(tmp_path / "none.jsonl"))
    fails("are not read", made(tokenizer / "tokenizer.json"))
    fails("holds no text", made(_folder(tmp_path / "empty")))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 and no more")
    fails("cannot be read", made(tmp_path / "d.parquet"))
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe\xfa")
    fails("cannot be read", made(tmp_path / "e.txt"))
    (tmp_path / "f.txt").write_text("")
    fails("hold no text", made(tmp_path / "f.txt"))
    fails("tokens already", lambda: prepare([tmp_path], tokenizer=tokenizer, out=store.folder))
    fails("no tokenizer", lambda: prepare([tmp_path / "f.txt"], tokenizer=tmp_path, out=tmp_path / "g"))
    fails("a sequence of", lambda: Stream(store, batch=1, seq=10**6))
    talk = [{"role": "user", "content": "w1"}]
    fails("no turn of the assistant", made(lines(tmp_path / "h.jsonl", [{"messages": talk}])))


def test_damaged_stores_are_told(store: TokenStore, tmp_path: Path) -> None:
    import shutil

    fails("no tokens", lambda: TokenStore(tmp_path))
    for number, damage in enumerate((b"", b"\x93NUMPY\x01\x00", b"not numpy")):
        copied = Path(shutil.copytree(store.folder, tmp_path / str(number)))
        (copied / "00001.tokens.npy").write_bytes(damage)
        fails("cannot be read|entries", lambda copied=copied: TokenStore(copied))
    copied = Path(shutil.copytree(store.folder, tmp_path / "flipped"))
    file = copied / "00000.tokens.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    fails("checksum", TokenStore(copied).verify)
    write_about(copied, vocabulary=1, tokenizer="", shards=[])
    fails("does not describe", lambda: TokenStore(copied))


def test_shards_that_change_under_a_run_are_named(store: TokenStore, tmp_path: Path) -> None:
    """Cut short, or gone, after it was opened: an error with the file, in the loop, and no signal."""
    import shutil

    for damage in ("cut", "gone"):
        copied = Path(shutil.copytree(store.folder, tmp_path / damage))
        stream = Stream(TokenStore(copied), batch=4, seq=16, shuffle=False)
        batches = stream.from_position(0, ahead=1)
        next(batches)
        file = copied / "00002.tokens.npy"
        if damage == "cut":
            file.write_bytes(file.read_bytes()[:200])
        else:
            file.unlink()
        with pytest.raises(UsageError, match=r"00002\.tokens\.npy"):
            list(itertools.islice(batches, stream.samples))


def test_a_run_refuses_tokens_that_are_not_as_they_were_written(store: TokenStore, tmp_path: Path) -> None:
    import shutil

    check_data(str(store.folder))
    check_data("pydoc")
    copied = Path(shutil.copytree(store.folder, tmp_path / "flipped"))
    file = copied / "00001.tokens.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"00001\.tokens\.npy"):
        check_data(str(copied))
    TokenStore(copied).verify(most_bytes=1000)  # so much is as it was


def numbered(step: int, position: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([step, position])}


def test_batches_come_ahead_in_order_and_anew_from_anywhere() -> None:
    with Ahead(numbered, batch=8) as ahead:
        got = [
            ahead.get(step, position)["input_ids"].tolist()
            for step, position in ((0, 0), (1, 8), (1, 24), (2, 32))
        ]
    assert got == [[0, 0], [1, 8], [1, 24], [2, 32]]
    assert not [thread for thread in threading.enumerate() if thread.name == "autopar data"]


def test_the_thread_makes_no_more_than_it_may() -> None:
    made: list[int] = []

    def make(step: int, position: int) -> dict[str, torch.Tensor]:
        made.append(step)
        return numbered(step, position)

    with Ahead(make, batch=1, depth=3) as ahead:
        ahead.get(0, 0)
        time.sleep(0.3)
        assert len(made) <= 1 + 3 + 1  # given, waiting, and one that finds no place


def test_errors_of_the_thread_end_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(step: int, position: int) -> dict[str, torch.Tensor]:
        if step == 2:
            raise ZeroDivisionError("by nothing")
        return numbered(step, position)

    with Ahead(bad, batch=1) as ahead:
        ahead.get(0, 0)
        ahead.get(1, 1)
        with pytest.raises(TrainingError, match="ZeroDivisionError: by nothing") as caught:
            ahead.get(2, 2)
        assert caught.value.hint
        assert "step 3" in str(caught.value)
    with Ahead(numbered, batch=1) as ahead:  # the thread itself dies
        monkeypatch.setattr("autopar.data.ahead._Work._run", lambda self, *arguments: None)
        with pytest.raises(TrainingError, match="has ended without one"):
            ahead.get(0, 0)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_an_epoch_over_data_ranks_is_each_sample_once(store: TokenStore, ranks: int) -> None:
    """Every rank cuts its rows as the runtime does; the ranks change in the middle of the epoch, the batch too."""
    from autopar.mesh import Mesh
    from autopar.runtime.groups import join_mesh
    from autopar.runtime.simulate import simulate
    from autopar.sharding import Sharding

    samples = Stream(store, batch=8, seq=16, seed=3).samples

    def rows(ranks: int, batch: int, first: int, until: int) -> list[tuple[int, ...]]:
        def work(rank: int) -> list[torch.Tensor]:
            stream = Stream(store, batch=batch, seq=16, seed=3)
            groups = join_mesh(Mesh.of({"dp": ranks, "fsdp": 1, "tp": 1}), timeout_s=30)
            split = Sharding.parse("[_@dp, _]")
            return [groups.cut(stream.at(at)["input_ids"], split) for at in range(first, until, batch)]

        pieces = simulate(ranks, work, timeout_s=60)
        return [tuple(row) for step in zip(*pieces, strict=True) for part in step for row in part.tolist()]

    half = samples // 2 // 8 * 8
    seen = rows(ranks, 8, 0, half) + rows(8 // ranks, 16, half, samples)
    one = rows(1, 8, 0, samples)[:samples]
    tokens, _ = store.read(0, samples * 16)
    assert seen[:samples] == one
    assert sorted(one) == sorted(map(tuple, tokens.reshape(-1, 16).tolist()))


def test_a_shard_that_vanishes_ends_the_stream(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(store, batch=4, seq=16)

    def gone(first: int, count: int) -> object:
        raise UsageError("the shard is gone", hint="x")

    monkeypatch.setattr(store, "read", gone)
    fails("is gone", lambda: next(stream.from_position(0)))


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_training_reads_prepared_tokens(
    store: TokenStore,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step, and two of half the batch after a resume: the samples that come next. The wrong tokenizer is told."""
    import transformers

    from autopar.cli import main

    config = transformers.LlamaConfig(
        vocab_size=store.vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    for file in tokenizer.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())

    def losses(*arguments: str) -> list[float]:
        usual = [
            "train",
            str(tmp_path / "model"),
            "-c",
            "cpu:1",
            "--batch",
            "4",
            "--seq",
            "16",
            "--json",
            "-q",
        ]
        monkeypatch.setattr(sys, "argv", ["autopar", *usual, "--data", str(store.folder), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert not ended.value.code, told.err
        return [json.loads(line)["loss"] for line in told.out.splitlines()]

    losses("--steps", "1", "--out", str(tmp_path / "run"), "--no-export")
    given: list[dict[str, torch.Tensor]] = []
    at = Stream.at
    monkeypatch.setattr(Stream, "at", lambda self, position: given.append(at(self, position)) or given[-1])
    losses("--steps", "3", "--out", str(tmp_path / "run"), "--no-export", "--resume", "--batch", "2")
    expected = Stream(store, batch=8, seq=16).at(0)["input_ids"]  # what a batch of 8 would have had
    assert torch.equal(torch.cat([batch["input_ids"] for batch in given[:2]]), expected[4:])
    about = json.loads((tmp_path / "run" / "step-00000003" / "training.json").read_text())
    assert about["sequences"] == 4 + 2 + 2
    (tmp_path / "model" / "tokenizer.json").write_text(
        (tokenizer / "tokenizer.json").read_text().replace('"w199"', '"w200"')
    )
    with pytest.raises(AssertionError, match="another tokenizer"):
        losses("--steps", "1")
