"""Checkpoints: bitwise on any other mesh, whole or not there, checked before anything changes, kept and removed."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import autopar
from autopar.compiled import Compiled
from autopar.cost.money import daly_interval_s
from autopar.errors import AutoparError, TrainingError
from autopar.runtime import checkpoint_storage, saving
from autopar.runtime.checkpoint import checkpoints, load_checkpoint, newest_whole
from autopar.runtime.saving import SavePolicy, Saver, mean_time_between_failures
from autopar.runtime.simulate import simulate
from autopar.runtime.trainer import Trainer
from tests.checkpoints import whole_tensors
from tests.packed import packed

FIXED = ("heads=tp", "ffn=tp")


def compiled(mesh: str, kind: str = "gpt2") -> Compiled:
    model, batch = packed(kind)
    sizes = [int(part.partition("=")[2]) for part in mesh.split(",")]
    fix = FIXED if "tp" in mesh else ()
    return autopar.compile(model, f"cpu:{math.prod(sizes)}", batch, mesh=mesh, fix=fix)


pytestmark = pytest.mark.usefixtures("captured_once")


def one_process(kind: str = "gpt2") -> tuple[Compiled, dict[str, Any]]:
    _, batch = packed(kind)
    return compiled("dp=1", kind).start(lr=1e-3, weight_decay=0.1), batch


def gathered(trainer: Trainer) -> dict[str, Tensor]:
    """All parameters and moments of a run, whole, by its own collectives. Every rank must call it."""
    store, state = trainer.store, trainer.optimizer.state
    found = {}
    for name in store.parts:
        found[f"model/{name}"] = store.whole_parameter(name, lambda entry: entry.parameter.detach())
        for field in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer/{name}/{field}"] = store.whole_parameter(
                name,
                lambda entry, field=field: state[entry.parameter].get(
                    field, torch.zeros_like(entry.parameter)
                ),
            )
    return found


# ---- any mesh ----------------------------------------------------------------------------------------------------


def test_every_mesh_reads_what_another_wrote_bit_for_bit(tmp_path: Path) -> None:
    """dp, fsdp (rows that do not divide), tp, and both, in turn, over packed weights; each reads and writes anew."""
    _, batch = packed("gpt2")

    def first(rank: int) -> dict[str, Tensor]:
        run = compiled_first.on_rank().start(lr=1e-3, weight_decay=0.1)
        run.train_step(batch)
        run.save(tmp_path / "0")
        return gathered(run.trainer)

    compiled_first = compiled("fsdp=2,tp=2")
    expected = simulate(4, first)[0]
    for number, mesh in enumerate(("tp=2", "fsdp=4", "dp=2", "dp=1"), 1):
        other = compiled(mesh)

        def go_on(rank: int, other: Compiled = other, number: int = number) -> dict[str, Tensor]:
            run = other.on_rank().start(lr=1e-3, weight_decay=0.1)
            run.load(tmp_path / str(number - 1))
            run.save(tmp_path / str(number))
            return gathered(run.trainer)

        ranks = other.plan.parsed_mesh.device_count
        for found in simulate(ranks, go_on) if ranks > 1 else [go_on(0)]:
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), (mesh, name)
    stored = [whole_tensors(tmp_path / str(number) / "step-00000001") for number in range(5)]
    for found in stored[1:]:
        assert found.keys() == stored[0].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in stored[0].items())
    assert all(torch.equal(stored[0][name], tensor) for name, tensor in expected.items())
    assert {name.rpartition("/")[2] for name in stored[0] if name.startswith("optimizer.whole/")} == {"step"}


def test_replicas_are_written_once_and_about_evenly(tmp_path: Path) -> None:
    made, (_, batch) = compiled("dp=4"), packed("gpt2")

    def save(rank: int) -> None:
        run = made.on_rank().start()
        run.train_step(batch)
        run.save(tmp_path)

    simulate(4, save)
    files = sorted((tmp_path / "step-00000001").glob("part-*"))
    sizes = [file.stat().st_size for file in files]
    alone = sum(tensor.nbytes for tensor in whole_tensors(tmp_path / "step-00000001").values())
    assert len(files) == 4
    assert alone < sum(sizes) < 1.05 * alone
    assert max(sizes) < 1.3 * min(sizes)


def test_an_optimizer_whose_state_belongs_to_a_share_is_not_saved_wrongly(tmp_path: Path) -> None:
    made, (_, batch) = compiled("tp=2"), packed("gpt2")

    def save(rank: int) -> None:
        run = made.on_rank().start(optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2))
        run.train_step(batch)
        run.save(tmp_path)

    with pytest.raises(TrainingError, match="not the same on all ranks"):
        simulate(2, save)
    assert checkpoints(tmp_path) == []


def test_averages_go_with_the_parameters(tmp_path: Path) -> None:
    run, batch = one_process()
    run.train_step(batch)
    averages = {name: parameter.detach() * 0.5 for name, parameter in run.parameters.items()}
    saver = Saver(run.trainer, tmp_path, SavePolicy(), about=dict, extra=lambda: {"ema": averages})
    saver.save(wait=True)
    back = {name: torch.zeros_like(tensor) for name, tensor in averages.items()}
    load_checkpoint(tmp_path, run.trainer, extra={"ema": back})
    assert all(torch.equal(back[name], tensor) for name, tensor in averages.items())


# ---- format 1 ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_format_1_is_gone_on_from(tmp_path: Path) -> None:
    """Written here from plain PyTorch, as earlier versions laid it out."""
    model, batch = packed("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    made = compiled("fsdp=2,tp=2")

    def step() -> None:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    names = dict(model.named_parameters())
    tensors = {**names, **dict(model.named_buffers())}
    save_file(
        {name: tensor.detach().clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    moments = {
        f"{name}|{key}": value.clone()
        for name in names
        for key, value in optimizer.state[names[name]].items()
    }
    save_file(moments, tmp_path / "optimizer.safetensors")
    (tmp_path / "training.json").write_text(json.dumps({"format": 1, "step": 1}))

    def go_on(rank: int) -> dict[str, Tensor]:
        # as the plain one: by itself a run spares norms and biases the weight decay
        run = made.on_rank().start(
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
        )
        run.load(tmp_path)
        assert run.train_step(batch).step == 2
        return gathered(run.trainer)

    found = simulate(4, go_on)[0]
    step()
    for name, parameter in names.items():
        torch.testing.assert_close(found[f"model/{name}"], parameter.detach(), rtol=0, atol=2e-5)


# ---- whole or not there ------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What stands for a kill: nothing handles it."""


@contextlib.contextmanager
def killed_after(limit: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every operation on the disk counts; the one after `limit` does not happen, and nothing after it."""
    done: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if len(done) >= limit:
                raise Killed(name)
            done.append(name)
            return call(*arguments, **options)

        return wrapped

    def half(tensors: Any, file: Path) -> None:
        Path(file).write_bytes(b"half of it")
        save(tensors, file)

    save = counted("save_file", save_file)
    with monkeypatch.context() as patch:
        for place, name in (
            (Path, "mkdir"), (Path, "rename"), (Path, "write_text"), (Path, "unlink"), (Path, "chmod"),
            (shutil, "rmtree"), (checkpoint_storage, "flush"),
        ):  # fmt: skip
            patch.setattr(place, name, counted(name, getattr(place, name)))
        patch.setattr(checkpoint_storage, "save_file", half)
        yield done


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step"])
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    run, batch = one_process()
    name = next(iter(run.parameters))
    run.train_step(batch)
    run.save(tmp_path / "pristine")
    states = [run.parameters[name].detach().clone(), run.parameters[name].detach() + 1]
    found = []
    for limit in range(100):
        out = tmp_path / str(limit)
        shutil.copytree(tmp_path / "pristine", out)
        with torch.no_grad():
            run.parameters[name].copy_(states[1])
        run.trainer.step_count = 1 if again else 2
        with killed_after(limit, monkeypatch) as done, contextlib.suppress(Killed, TrainingError):
            run.save(out)
        run.load(out)
        found.append(next(number for number in (0, 1) if torch.equal(run.parameters[name], states[number])))
        with torch.no_grad():  # and a save over what is left comes to its end
            run.parameters[name].copy_(states[1])
        run.trainer.step_count = 3
        run.save(out)
        assert checkpoints(out)[0].name == "step-00000003"
        if len(done) < limit:
            break
    assert found == sorted(found)
    assert set(found) == {0, 1}
    assert len(found) > 10


def test_a_full_disk_is_told_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    run, batch = one_process()
    run.train_step(batch)
    run.save(tmp_path)
    run.train_step(batch)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # a file that grows beyond it is an error
    try:
        with pytest.raises(TrainingError, match="cannot be written") as caught:
            run.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step-00000002" in str(caught.value)
    assert caught.value.hint
    assert not list(tmp_path.glob("*/part*.tmp"))
    run.load(tmp_path)
    assert run.trainer.step_count == 1


# ---- bad checkpoints ---------------------------------------------------------------------------------------------


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def _edited(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "one bit": lambda folder: _flipped(next(folder.glob("part-*"))),
    "truncated": lambda folder: next(folder.glob("part-*")).write_bytes(b"\0\0"),
    "a part is gone": lambda folder: next(folder.glob("part-*")).unlink(),
    "index": lambda folder: _flipped(folder / "index.json"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest is no JSON": lambda folder: (folder / "manifest.json").write_text("{"),
    "manifest of nothing": lambda folder: (folder / "manifest.json").write_text('{"files": {}}'),
    "no JSON": lambda folder: (folder / "training.json").write_text("{"),
    "no step": lambda folder: (folder / "training.json").write_text("{}"),
    "newer": lambda folder: _edited(folder / "training.json", format=99),
    "other model": lambda folder: _edited(folder / "training.json", fingerprint="0" * 64),
}


def test_bad_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    run, batch = one_process()
    run.train_step(batch)
    run.save(tmp_path / "good")
    with torch.no_grad():
        next(iter(run.parameters.values())).add_(1.0)
    before = {name: parameter.detach().clone() for name, parameter in run.parameters.items()}
    for case, damage in DAMAGE.items():
        folder = tmp_path / case
        shutil.copytree(tmp_path / "good", folder)
        damage(folder / "step-00000001")
        with pytest.raises(AutoparError) as caught:
            run.load(folder)
        assert caught.value.hint, case
        assert str(folder) in str(caught.value), case
        assert all(torch.equal(before[name], parameter) for name, parameter in run.parameters.items()), case


INDEX_DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lacks a tensor": lambda tensors: tensors.pop("model/transformer.wte.weight"),
    "other shape": lambda tensors: tensors["model/transformer.wte.weight"].update(shape=[3, 64], pieces=[]),
    "lacks a piece": lambda tensors: tensors["model/transformer.wte.weight"].update(pieces=[]),
    "other dtype": lambda tensors: tensors["model/transformer.wte.weight"].update(dtype="bfloat16"),
    "a file elsewhere": lambda tensors: tensors["model/transformer.wte.weight"]["pieces"][0].__setitem__(
        0, "../x"
    ),
    "no dtype": lambda tensors: tensors["model/transformer.wte.weight"].update(dtype="os"),
    "outside": lambda tensors: tensors["model/transformer.wte.weight"]["pieces"][0].__setitem__(2, [999, 0]),
}


@pytest.mark.parametrize("case", INDEX_DAMAGE)
def test_an_index_that_lies_is_refused_without_checksums_too(tmp_path: Path, case: str) -> None:
    run, batch = one_process()
    run.train_step(batch)
    run.save(tmp_path)
    file = tmp_path / "step-00000001" / "index.json"
    tensors = json.loads(file.read_text())["tensors"]
    INDEX_DAMAGE[case](tensors)
    file.write_text(json.dumps({"tensors": tensors}))
    before = {name: parameter.detach().clone() for name, parameter in run.parameters.items()}
    with pytest.raises(TrainingError) as caught:
        load_checkpoint(tmp_path, run.trainer, verify=False)
    assert caught.value.hint
    assert str(tmp_path) in str(caught.value)
    assert all(torch.equal(before[name], parameter) for name, parameter in run.parameters.items())


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    made, (_, batch) = compiled("fsdp=2"), packed("gpt2")
    ended: list[int] = []

    def save_and_load(rank: int) -> None:
        run = made.on_rank().start()
        run.train_step(batch)
        run.save(tmp_path)
        if rank == 1:
            _flipped(tmp_path / "step-00000001" / "part-00002-of-00002.safetensors")
        torch.distributed.barrier()
        with pytest.raises(TrainingError, match="SHA-256"):
            run.load(tmp_path)
        ended.append(rank)

    simulate(2, save_and_load)
    assert sorted(ended) == [0, 1]


def test_a_run_passes_over_a_damaged_checkpoint_and_says_so(tmp_path: Path) -> None:
    run, batch = one_process()
    for _ in range(3):
        run.train_step(batch)
        run.save(tmp_path)
    DAMAGE["one bit"](tmp_path / "step-00000003")
    said: list[str] = []
    assert newest_whole(tmp_path, said.append) == tmp_path / "step-00000002"
    assert "step-00000003" in said[0]
    assert "SHA-256" in said[0]
    assert (tmp_path / "step-00000003.damaged").is_dir()
    for left in ("step-00000001", "step-00000002"):
        DAMAGE["one bit"](tmp_path / left)
    with pytest.raises(TrainingError, match="SHA-256"):
        newest_whole(tmp_path, said.append)


# ---- when and how ------------------------------------------------------------------------------------------------


def test_a_save_in_the_background_is_of_the_step_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, batch = one_process()
    run.train_step(batch)
    expected = {name: parameter.detach().clone() for name, parameter in run.parameters.items()}
    writing = checkpoint_storage.save_file
    monkeypatch.setattr(
        checkpoint_storage,
        "save_file",
        lambda *arguments: (torch.ones(1), trained.wait(10), writing(*arguments)),
    )
    trained = threading.Event()
    saver = Saver(run.trainer, tmp_path, SavePolicy(every=1, asynchronous=True), about=dict)
    saver.after_step()
    assert checkpoints(tmp_path) == []
    run.train_step(batch)  # changes every parameter before anything is written
    trained.set()
    saver.wait()
    run.load(tmp_path)
    assert run.trainer.step_count == 1
    assert all(torch.equal(expected[name], parameter) for name, parameter in run.parameters.items())


@pytest.mark.parametrize("when", ["the next step", "the end"])
def test_an_error_in_the_background_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run, batch = one_process()
    run.train_step(batch)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_storage, "save_file", full)
    saver = Saver(run.trainer, tmp_path, SavePolicy(every=1, asynchronous=True), about=dict)
    saver.save()
    assert saver._pending is not None
    saver._pending.exception(timeout=20)
    with pytest.raises(TrainingError, match="No space left"):
        saver.after_step() if when == "the next step" else saver.finish()
    assert checkpoints(tmp_path) == []


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    run, batch = one_process()
    run.train_step(batch)
    saver = Saver(run.trainer, tmp_path, SavePolicy(every=2, keep=2, asynchronous=False), about=dict)
    (tmp_path / "step-00000001.partial").mkdir()
    (tmp_path / "notes").mkdir()
    for step in range(1, 10):
        run.trainer.step_count = step
        saver.after_step()
    saver.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000008", "step-00000009"]


def test_the_interval_is_dalys_from_the_measured_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, batch = one_process()
    run.train_step(batch)
    now = 1000.0
    monkeypatch.setattr(saving.time, "monotonic", lambda: now)
    said: list[str] = []
    policy = SavePolicy(mtbf_s=1e4, mtbf_source="(given)", asynchronous=False)
    saver = Saver(run.trainer, tmp_path, policy, about=dict, say=said.append)
    assert "is assumed" in said[0]
    saver.times.stall_s.append(2.0)
    assert saver.interval_s == daly_interval_s(2.0, 1e4) == pytest.approx(198.7, abs=1)
    now += 190
    saver.after_step()
    assert checkpoints(tmp_path) == []
    now += 20
    saver.after_step()
    assert len(checkpoints(tmp_path)) == 1


def test_the_time_between_failures_is_given_or_the_devices() -> None:
    assert mean_time_between_failures(16384, 419 / (54 * 24 * 16384), None)[0] / 3600 == pytest.approx(
        54 * 24 / 419
    )
    assert mean_time_between_failures(8, 1e-5, 12.0) == (12 * 3600.0, "(--mtbf-hours)")
    assert mean_time_between_failures(8, 0.0, None)[0] == math.inf


def test_a_run_never_saves_between_the_files_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    run, batch = one_process()
    run.train_step(batch)
    with pytest.raises(TrainingError, match="not a training checkpoint"):
        run.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"
