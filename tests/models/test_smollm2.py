"""The real-weights fixture: made once, whole or not at all; and, marked slow, what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import ModelError
from autopar.models import find_model, smollm2
from autopar.models.smollm2 import fetch_smollm2, is_complete, main, write_once


def fake_checkpoint(folder: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("fake")


def test_a_complete_folder_is_returned_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_checkpoint(tmp_path)
    monkeypatch.setattr(smollm2, "convert", lambda *_: pytest.fail("converted again"))
    assert fetch_smollm2(tmp_path) == tmp_path


def test_the_first_call_converts_the_given_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    asked: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        asked.append(file)
        fake_checkpoint(folder)

    monkeypatch.setattr(smollm2, "convert", convert)
    folder = tmp_path / "deep" / "smollm2"
    assert fetch_smollm2(folder, gguf=gguf) == fetch_smollm2(folder, gguf=gguf) == folder
    assert asked == [gguf]
    assert is_complete(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_once(tmp_path / "smollm2", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_result_of_a_faster_process_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2"

    def write(part: Path) -> None:
        fake_checkpoint(part)
        folder.mkdir()
        fake_checkpoint(folder)
        (folder / "config.json").write_text("theirs")

    write_once(folder, write)
    assert (folder / "config.json").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ModelError, match="holds something else"):
        fetch_smollm2(tmp_path)


def test_a_missing_gguf_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such GGUF file"):
        fetch_smollm2(tmp_path / "new", gguf=tmp_path / "missing.gguf")


def test_the_command_line_reports_errors_by_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_checkpoint(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)
    assert main([]) == 2
    assert "try python -m autopar.models.smollm2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_answers_and_its_tokenizer_round_trips() -> None:
    from transformers import AutoTokenizer

    folder = fetch_smollm2(Path(".cache/smollm2"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "def f(x):\n    return x  # café, 北京, 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    source = find_model(str(folder))
    assert source.load is not None
    model: Any = source.load().eval()
    prompt = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    answer = model.generate(prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, -1:]) == " Paris"
    assert model.lm_head.weight is model.model.embed_tokens.weight
