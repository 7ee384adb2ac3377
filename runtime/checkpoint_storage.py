"""Where a checkpoint's tensors lie on disk: storage for `torch.distributed.checkpoint`, in safetensors and JSON.

In:  a save plan: which pieces of which tensors this rank writes. Out: a folder, complete or not there at all:

    part-00001-of-00002.safetensors   what rank 0 writes; a piece of a tensor is `NAME[0:16, :]`
    index.json                        NAME -> dtype, shape, and where its pieces lie
    training.json, plan.json, ...     text that the run wants beside them
    manifest.json                     the size and SHA-256 of every file, written last

All is written to FOLDER.partial and forced to the disk; then one rename makes FOLDER. No file holds code, and nothing is
unpickled. torch's own HuggingFaceStorageWriter is not used: it takes one piece of a tensor per file (a rank may hold
several, of a packed parameter), builds the whole file in memory, and leaves out checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from autopar.errors import TrainingError

INDEX, MANIFEST = "index.json", "manifest.json"
PARTIAL, REPLACED = ".partial", ".replaced"
_PART = re.compile(r"part-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class Piece:
    """A stored rectangle of a tensor: under `key` in `file`."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, in pieces that together are all of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


Index = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class _Written:
    """What a rank tells of a piece it wrote, and of the file it is in."""

    file: str
    key: str
    bytes: int
    sha256: str


# ---- writing -----------------------------------------------------------------------------------------------------


class Writer(StorageWriter):
    """Writes the folder of one checkpoint. `files`: name -> text, to go beside the tensors."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        super().__init__()
        self.folder, self.files = folder, files
        self.partial = folder.with_name(folder.name + PARTIAL)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank writes: an empty folder, and a file name for each rank."""
        with _disk(self.folder, "written"):
            if self.partial.exists():  # of a save that was killed
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True)
        return [
            replace(plan, storage_data=f"part-{number:05d}-of-{len(plans):05d}.safetensors")
            for number, plan in enumerate(plans, 1)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        file = self.partial / plan.storage_data
        try:
            with _disk(self.folder, "written"):
                return self._write_to(file, plan, planner)
        except BaseException:
            file.unlink(missing_ok=True)  # a full disk: leave room for what the others still do
            raise

    def _write_to(self, file: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        keys = {item.index: _key(item) for item in plan.items}
        tensors = {keys[item.index]: _as_tensor(planner.resolve_data(item)) for item in plan.items}
        save_file(tensors, file)
        file.chmod(self.partial.stat().st_mode & 0o666)  # safetensors makes files for their owner only
        flush(file)
        size, digest = file.stat().st_size, checksum(file)
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=tensors[keys[item.index]].nbytes,
                storage_data=_Written(file.name, keys[item.index], size, digest),
            )
            for item in plan.items
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all have written: the index, the texts, the manifest, and the rename."""
        with _disk(self.folder, "written"):
            self._finish(metadata, results)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [(result.index, result.storage_data) for rank in results for result in rank]
        texts = {INDEX: json.dumps(_index_text(metadata, written)), **self.files}
        files = {stored.file: {"bytes": stored.bytes, "sha256": stored.sha256} for _, stored in written}
        for name, text in texts.items():
            write_text(self.partial / name, text)
            data = text.encode()
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        write_text(self.partial / MANIFEST, json.dumps({"files": files}, indent=1))
        flush(self.partial)
        self._publish()

    def _publish(self) -> None:
        """The rename that makes the save count. A folder of this step that is there already is replaced: for the moment
        between two renames it is FOLDER.replaced, which readers know."""
        replaced = self.folder.with_name(self.folder.name + REPLACED)
        if self.folder.exists():
            if replaced.exists():
                shutil.rmtree(replaced)
            self.folder.rename(replaced)
        self.partial.rename(self.folder)
        flush(self.folder.parent)
        if replaced.exists():
            shutil.rmtree(replaced)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _key(item: WriteItem) -> str:
    """`NAME` for a whole tensor, `NAME[0:16, :]` for a part of it."""
    assert item.tensor_data is not None
    whole, chunk = item.tensor_data.size, item.tensor_data.chunk
    if tuple(whole) == tuple(chunk.sizes):
        return item.index.fqn
    ranges = [
        ":" if size == length else f"{start}:{start + size}"
        for length, start, size in zip(whole, chunk.offsets, chunk.sizes, strict=True)
    ]
    return f"{item.index.fqn}[{', '.join(ranges)}]"


def _as_tensor(data: Any) -> Tensor:
    assert isinstance(data, Tensor)
    return data.detach().cpu().contiguous()


def _index_text(metadata: Metadata, written: Sequence[tuple[MetadataIndex, _Written]]) -> dict[str, Any]:
    places = {(index.fqn, tuple(index.offset or ())): stored for index, stored in written}
    tensors = {}
    for name, about in metadata.state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata)
        pieces = []
        for chunk in about.chunks:
            stored = places[name, tuple(chunk.offsets)]
            pieces.append([stored.file, stored.key, list(chunk.offsets), list(chunk.sizes)])
        dtype = str(about.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(about.size), "pieces": pieces}
    return {"tensors": tensors}


def write_text(file: Path, text: str) -> None:
    """Write a small file and force it to the disk."""
    file.write_text(text, encoding="utf-8")
    flush(file)


def flush(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- reading -----------------------------------------------------------------------------------------------------


class Reader(StorageReader):
    """Reads from `folder` what `index` says is there."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__()
        self.folder, self.index = folder, index
        self.places = {
            (name, piece.offsets): piece for name, stored in index.items() for piece in stored.pieces
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self.index)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[str, Any]]] = {}
        for item in plan.items:
            piece = self.places[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file.setdefault(piece.file, []).append((piece.key, item))
        for file, items in by_file.items():
            with _disk(self.folder, "read"), safe_open(self.folder / file, "pt") as tensors:
                for key, item in items:
                    found = _part(tensors, key, item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item)
                    target.copy_(found)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _part(tensors: Any, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    if not len(lengths):
        whole: Tensor = tensors.get_tensor(key)
        return whole
    ranges = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
    part: Tensor = tensors.get_slice(key)[ranges]
    return part


def metadata_of(index: Index) -> Metadata:
    """The index as `torch.distributed.checkpoint` wants it."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=stored.dtype),
                torch.Size(stored.shape),
                [
                    ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                    for piece in stored.pieces
                ],
            )
            for name, stored in index.items()
        }
    )


def read_index(folder: Path) -> Index:
    """index.json of a checkpoint, checked. Raises TrainingError."""
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return {name: _stored(name, about) for name, about in found["tensors"].items()}
    except OSError as error:
        raise unreadable(folder, f"{INDEX}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(folder, f"{INDEX} is not one that autopar wrote ({error})") from error


def _stored(name: str, about: Any) -> StoredTensor:
    dtype = getattr(torch, about["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {about['dtype']}")
    shape = tuple(map(int, about["shape"]))
    pieces = tuple(
        Piece(str(file), str(key), tuple(map(int, offsets)), tuple(map(int, sizes)))
        for file, key, offsets, sizes in about["pieces"]
    )
    for piece in pieces:
        if not _PART.fullmatch(piece.file):  # never a path to elsewhere
            raise ValueError(f"{name} is said to be in {piece.file}")
        ends = [start + size for start, size in zip(piece.offsets, piece.sizes, strict=True)]
        if len(ends) != len(shape) or any(end > length for end, length in zip(ends, shape, strict=True)):
            raise ValueError(f"a piece of {name} lies outside of it")
    return StoredTensor(dtype, shape, pieces)


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """File name -> bytes, SHA-256. Raises TrainingError for a folder that has no complete checkpoint."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        found = {str(name): (int(about["bytes"]), str(about["sha256"])) for name, about in files.items()}
    except OSError as error:
        raise unreadable(folder, f"{MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(folder, f"{MANIFEST} is not one that autopar wrote") from error
    if INDEX not in found or any("/" in name or name.startswith(".") for name in found):
        raise unreadable(folder, f"{MANIFEST} is not one that autopar wrote")
    return found


def damage(
    folder: Path, manifest: Mapping[str, tuple[int, str]], *, part: int = 0, parts: int = 1
) -> str | None:
    """What is wrong with the files of a checkpoint, None if nothing. With `parts` ranks each looks at its `part`."""
    for name in sorted(manifest)[part::parts]:
        size, digest = manifest[name]
        try:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, it was written with {size}"
            if checksum(folder / name) != digest:
                return f"{name} is not as it was written (its SHA-256 differs)"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


@contextmanager
def _disk(folder: Path, done: str) -> Iterator[None]:
    """Says of an error of the disk (full, read-only, gone) which checkpoint it is about."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"the checkpoint cannot be {done}: {error}",
            where=str(folder),
            hint="a folder with space; the checkpoints before it are as they were"
            if done == "written"
            else "an earlier checkpoint",
        ) from error


def unreadable(folder: Path, why: str) -> TrainingError:
    return TrainingError(
        f"the checkpoint cannot be read: {why}",
        where=str(folder),
        hint="an earlier checkpoint, or --resume on the run's folder: it takes the newest that is whole",
    )
