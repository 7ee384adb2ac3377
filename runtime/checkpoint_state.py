"""What a checkpoint holds of a run, and who holds it: tensors by name, each in pieces that ranks have.

In:  a trainer. Out: `held`, this rank's pieces, and planners of `torch.distributed.checkpoint` over them; the other way,
`wanted`, what this rank reads, whatever the mesh was when it was written.

    model/NAME                 a parameter or buffer, under the model's own name
    optimizer/NAME/FIELD       optimizer state of the parameter's shape, cut as the parameter is
    optimizer.whole/STATE/FIELD    another tensor (a step counter): whole, and the same on all ranks that have it
    optimizer.number/STATE/FIELD   a number that is no tensor
    KIND/NAME                  more tensors with the parameters' shapes (averaged weights)

STATE is the name in the program: of a packed parameter that of a piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.errors import TrainingError
from autopar.runtime.checkpoint_storage import Index, StoredTensor
from autopar.runtime.regions import Region
from autopar.runtime.store import ParameterStore
from autopar.runtime.trainer import Trainer

MODEL, OPTIMIZER, WHOLE, NUMBER = "model", "optimizer", "optimizer.whole", "optimizer.number"
# Kinds of numbers an optimizer may keep outside of tensors, and the dtype that holds each exactly.
_NUMBERS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}

# Sets of tensors that go with the parameters, by kind and then by name of state: {"ema": {state: tensor}}.
Extra = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Share:
    """A rectangle of the tensor `name`, whose whole shape is `shape`. `equal`: all ranks that have it have the same, or
    it is an error."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    equal: bool = False

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.tensor.shape))

    @property
    def key(self) -> str:
        """A name for it among this rank's shares."""
        return f"{self.name} {list(self.offsets)}"


# ---- what a rank has ---------------------------------------------------------------------------------------------


def held(trainer: Trainer, extra: Extra | None = None, *, trained_only: bool = False) -> dict[str, Share]:
    """This rank's shares of all that a checkpoint holds; views of the run's own tensors where they are on the host.
    `trained_only`: without frozen parameters, which a run has from its base."""
    found: dict[str, Share] = {}
    for share in (*_of_model(trainer.store, extra or {}, trained_only), *_of_optimizer(trainer)):
        found.setdefault(share.key, share)
    return found


def _of_model(store: ParameterStore, extra: Extra, trained_only: bool) -> Iterator[Share]:
    for name, entry in store.entries.items():
        if trained_only and not entry.parameter.requires_grad:
            continue
        yield from _share(MODEL, store.region(name), entry.parameter)
        for kind, tensors in extra.items():
            if name in tensors:
                yield from _share(kind, store.region(name), tensors[name])
    for name in _buffers(store):
        yield from _share(MODEL, store.buffer_region(name), store.buffers[name])


def _buffers(store: ParameterStore) -> list[str]:
    """Constants of the program are no state: they come with it."""
    return [name for name in store.buffers if store.layouts[name].info.kind == "buffer"]


def _share(kind: str, region: Region, tensor: Tensor, field: str = "") -> Iterator[Share]:
    if region.elements:
        local = tensor.detach().reshape(region.sizes)
        yield Share(f"{kind}/{region.name}{field}", region.shape, region.offsets, local)


def _of_optimizer(trainer: Trainer) -> Iterator[Share]:
    states = {
        name: trainer.optimizer.state.get(entry.parameter, {})
        for name, entry in trainer.store.entries.items()
    }
    counters = _counters(trainer.store, states)
    for name, state in states.items():
        parameter, region = trainer.store.entries[name].parameter, trainer.store.region(name)
        for field, value in state.items():
            shaped = isinstance(value, Tensor) and value.shape == parameter.shape
            if shaped and (parameter.dim() or field not in counters):
                yield from _share(OPTIMIZER, region, value, f"/{field}")
            elif isinstance(value, Tensor):
                local = value.detach()
                yield Share(f"{WHOLE}/{name}/{field}", tuple(local.shape), (0,) * local.dim(), local, True)
            elif type(value) in _NUMBERS:
                number = torch.tensor(value, dtype=_NUMBERS[type(value)])
                yield Share(f"{NUMBER}/{name}/{field}", (), (), number, True)
            elif value is not None:
                raise TrainingError(
                    f"the optimizer keeps {field} of {name} as a {type(value).__name__}, which cannot be saved",
                    where=type(trainer.optimizer).__name__,
                    hint="an optimizer whose state is tensors and numbers",
                )


def _counters(store: ParameterStore, states: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Fields that are one number for parameters with dims. Of a parameter without dims the shape alone would not tell its
    average from its step counter."""
    return {
        field
        for name, state in states.items()
        if store.entries[name].parameter.dim()
        for field, value in state.items()
        if isinstance(value, Tensor) and not value.dim()
    }


class SavePlanner(DefaultSavePlanner):
    """torch's planner (each piece written once, by the rank with least to write; all pieces together are the whole)
    over shares instead of DTensors."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shares = {share.index: key for key, share in shares.items()}
        # what is to be written, as of now; the tensors come with the state (copies, where the save is asynchronous)
        self.items = [_write_item(share) for share in shares.values()]
        self.digests = {share.name: _digest(share.tensor) for share in shares.values() if share.equal}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self.items, planner_data=self.digests)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        seen: dict[str, str] = {}
        for plan in all_plans:
            for name, digest in plan.planner_data.items():
                if seen.setdefault(name, digest) != digest:
                    raise TrainingError(
                        f"the optimizer's {name.partition('/')[2]} is not the same on all ranks: it belongs to a share, "
                        "and could not be read on another mesh",
                        hint="an optimizer that works element by element (AdamW, SGD), or a plan that splits no parameter",
                    )
        return super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[self.shares[index]]
        return tensor


def _write_item(share: Share) -> WriteItem:
    about = TensorWriteData(share.chunk, TensorProperties(dtype=share.tensor.dtype), torch.Size(share.shape))
    return WriteItem(share.index, WriteItemType.SHARD, tensor_data=about)


def _digest(tensor: Tensor) -> str:
    flat = tensor.cpu().contiguous().reshape(-1)
    return (
        f"{tensor.dtype} {list(tensor.shape)} "
        + hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    )


# ---- what a rank wants -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A share to read into `share.tensor` (None: nothing of it is this rank's), and what then puts it into the run."""

    share: Share | None
    put: Callable[[], None]


def wanted(
    trainer: Trainer, index: Index, extra: Extra | None = None, *, trained_only: bool = False
) -> list[Wanted]:
    """What this rank reads of a checkpoint, which has frozen parameters unless `trained_only`. Raises TrainingError
    where the checkpoint is not of this model."""
    store = trainer.store
    found = [
        _into(MODEL, store.region(name), entry.parameter, index)
        for name, entry in store.entries.items()
        if not trained_only or entry.parameter.requires_grad
    ]
    found += [_into(MODEL, store.buffer_region(name), store.buffers[name], index) for name in _buffers(store)]
    kinds = {name.partition("/")[0] for name in index}
    for kind, tensors in (extra or {}).items():
        if kind in kinds:  # else what the run starts with stays: averages that an earlier run did not keep
            found += [_into(kind, store.region(name), tensor, index) for name, tensor in tensors.items()]
    result = [item for item in found if item is not None]
    return result + _optimizer_wanted(trainer, index)


def _into(kind: str, region: Region, tensor: Tensor, index: Index) -> Wanted | None:
    """Read the region, then copy it into `tensor`."""
    name = f"{kind}/{region.name}"
    stored = index.get(name)
    if stored is None:
        raise TrainingError(f"the checkpoint has no {_spoken(name)}", hint="a checkpoint of this model")
    if stored.shape != region.shape:
        raise TrainingError(
            f"{region.name} has shape {list(stored.shape)} in the checkpoint, {list(region.shape)} in the model",
            hint="a checkpoint of this model",
        )
    if stored.dtype != tensor.dtype:
        raise TrainingError(
            f"{region.name} is {stored.dtype} in the checkpoint, {tensor.dtype} in the run",
            hint="a plan with the precision that the checkpoint was trained in",
        )
    if not region.elements:
        return None
    fresh = torch.empty(region.sizes, dtype=stored.dtype)

    def put() -> None:
        with torch.no_grad():
            tensor.copy_(fresh.view(tensor.shape))

    return Wanted(Share(name, region.shape, region.offsets, fresh), put)


def _spoken(name: str) -> str:
    kind, _, rest = name.partition("/")
    return f"tensor {rest}" if kind == MODEL else f"{kind} of {rest}"


def _optimizer_wanted(trainer: Trainer, index: Index) -> list[Wanted]:
    """Optimizer state into fresh tensors: the run may not have made any yet."""
    store = trainer.store
    fields: dict[str, list[tuple[str, str, StoredTensor]]] = {}
    for name, stored in index.items():
        kind, _, rest = name.partition("/")
        if kind in (OPTIMIZER, WHOLE, NUMBER):
            of, _, field = rest.rpartition("/")
            fields.setdefault(of, []).append((kind, field, stored))
    result = []
    for name, entry in store.entries.items():
        if entry.parameter.requires_grad:
            of = store.region(name).name
            here = [item for item in fields.get(of, []) if item[0] == OPTIMIZER]
            # format 1 has a step counter once for all pieces of a packed parameter, under the parameter's name
            counted = name if name in fields or of not in fields else of
            here += [item for item in fields.get(counted, []) if item[0] != OPTIMIZER]
            state: dict[str, Any] = {}
            for kind, field, stored in here:
                source = of if kind == OPTIMIZER else counted
                result.append(_field_wanted(trainer, name, f"{kind}/{source}/{field}", stored, state))
            result.append(Wanted(None, partial(_install, trainer, entry.parameter, state)))
    return result


def _install(trainer: Trainer, parameter: torch.nn.Parameter, state: dict[str, Any]) -> None:
    trainer.optimizer.state.pop(parameter, None)
    if state:
        trainer.optimizer.state[parameter] = state


def _field_wanted(
    trainer: Trainer, name: str, stored_name: str, stored: StoredTensor, state: dict[str, Any]
) -> Wanted:
    """One field of a parameter's optimizer state, read into a tensor of its own and then put into `state`."""
    kind, field = stored_name.partition("/")[0], stored_name.rpartition("/")[2]
    parameter, region = trainer.store.entries[name].parameter, trainer.store.region(name)
    if kind != OPTIMIZER:
        fresh = torch.empty(stored.shape, dtype=stored.dtype)
        share = Share(stored_name, stored.shape, (0,) * len(stored.shape), fresh)
        device = _counter_device(trainer.optimizer, parameter)
        return Wanted(share, lambda: _set(state, field, fresh.item() if kind == NUMBER else fresh.to(device)))
    if stored.shape != region.shape:
        raise TrainingError(
            f"the optimizer's {field} of {region.name} has shape {list(stored.shape)} in the checkpoint, "
            f"{list(region.shape)} in the model",
            hint="a checkpoint of this model",
        )
    if not region.elements:
        nothing = torch.zeros(parameter.shape, dtype=stored.dtype, device=parameter.device)
        return Wanted(None, lambda: _set(state, field, nothing))
    own = torch.empty(region.sizes, dtype=stored.dtype)
    return Wanted(
        Share(stored_name, region.shape, region.offsets, own),
        lambda: _set(state, field, own.view(parameter.shape).to(parameter.device)),
    )


def _set(state: dict[str, Any], field: str, value: Any) -> None:
    state[field] = value


def _counter_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """Where an optimizer keeps its step counters: with the parameter if it is fused or capturable, else on the host (as
    `torch.optim.Optimizer.load_state_dict` puts them)."""
    for group in optimizer.param_groups:
        if any(parameter is member for member in group["params"]) and (
            group.get("fused") or group.get("capturable")
        ):
            return parameter.device
    return torch.device("cpu")


class SharesLoadPlanner(LoadPlanner):
    """Reads shares from whatever pieces the checkpoint has."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        self.shares = {share.index: share for share in shares.values()}
        self.metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        by_name: dict[str, list[Share]] = {}
        for share in self.shares.values():
            by_name.setdefault(share.name, []).append(share)
        items: list[ReadItem] = []
        for name, shares in by_name.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(name, stored, [share.chunk for share in shares])
            if sum(_elements(item.lengths) for item in found) != sum(
                share.tensor.numel() for share in shares
            ):
                raise TrainingError(
                    f"the checkpoint does not have all of {_spoken(name)}", hint="an earlier checkpoint"
                )
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise TrainingError("the checkpoint has something that is no tensor", hint="a checkpoint of autopar")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.shares[read_item.dest_index].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        return


def _elements(lengths: torch.Size) -> int:
    return reduce(mul, lengths, 1)
