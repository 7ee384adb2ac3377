"""Optimizers that look at a whole parameter, on shares of it: Muon, Adafactor; and several optimizers as one.

In:  a ParameterStore, whose parameters are shares with gradients.
Out: torch Optimizers over the shares that do what torch's own do on the whole parameters of the unsharded model.

Every rank of the store's mesh must step them together: they gather. A piece of a packed parameter (fused query, key and
value) is a parameter of its own here, as separate weights would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar import torch_private
from autopar.runtime.pipeline import PP
from autopar.runtime.store import Entry, ParameterStore

ParameterGroups = Iterable[Mapping[str, Any]]


class _OnShares(Optimizer):
    """An optimizer that knows which share of which parameter it steps."""

    def __init__(self, groups: ParameterGroups, store: ParameterStore, defaults: Mapping[str, Any]) -> None:
        super().__init__([dict(group) for group in groups], dict(defaults))
        self.store = store

    def with_gradient(self) -> Iterator[tuple[Entry, nn.Parameter, Tensor, dict[str, Any]]]:
        """(entry, parameter, gradient, group) in an order that is the same on every rank."""
        entries = {entry.parameter: entry for entry in self.store.entries.values()}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield entries[parameter], parameter, parameter.grad, group


class Muon(_OnShares):
    """`torch.optim.Muon` (Jordan et al. 2024) on shares of matrices [m, n].

    Momentum is kept and updated in shares. Then each matrix's momentum is gathered, one rank orthogonalises it (the
    matrices are spread over all ranks of the mesh, replicas too, by the operations they take) and hands the result to
    all, in bfloat16 as torch computes it. All ranks get the same bits, and the same as torch on the whole matrix.

    Settings are torch's. A group's `lr` is scaled by the shape of the whole matrix.
    """

    def __init__(self, groups: ParameterGroups, store: ParameterStore, **settings: Any) -> None:
        # torch's own constructor checks the settings and knows the defaults.
        checked = torch.optim.Muon([torch.zeros(1, 1)], **settings)
        super().__init__(groups, store, checked.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step. `closure` is not taken: gradients are there already."""
        assert closure is None
        work = list(self.with_gradient())
        groups = self.store.groups
        # The ranks with the same parameters: those of another pipeline stage step others.
        span = groups.span(axis for axis in groups.mesh.names if axis != PP)
        owners = _owners([entry.layout.info.shape for entry, *_ in work], span.size)
        made: dict[int, Tensor] = {}
        for index, (entry, parameter, gradient, group) in enumerate(work):
            whole = self.store.whole(entry.name, self._momentum(parameter, gradient, group))
            if owners[index] == span.index:
                made[index] = _orthogonal(whole, group)
        for index, (entry, parameter, _, group) in enumerate(work):
            shape = torch.Size(entry.layout.info.shape)
            if index in made:
                whole = made.pop(index)
            else:
                whole = torch.empty(
                    shape, dtype=torch.bfloat16, device=groups.device
                )  # with offload the shares are in host memory
            if span.group is not None:
                dist.broadcast(whole, group=span.group, group_src=owners[index])
            rate = float(group["lr"])
            parameter.mul_(1 - rate * group["weight_decay"])
            parameter.add_(
                self.store.share(entry.name, whole).reshape(parameter.shape).to(parameter.device),
                alpha=-torch_private.muon_rate(rate, group["adjust_lr_fn"], shape),
            )
        return None

    def _momentum(self, parameter: nn.Parameter, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        """This share of what is orthogonalised: the momentum, or Nesterov's."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def _orthogonal(whole: Tensor, group: Mapping[str, Any]) -> Tensor:
    # A bfloat16 momentum would be divided in place.
    matrix = whole.clone() if whole.dtype == torch.bfloat16 else whole
    result = torch_private.orthogonal(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
    return result.contiguous()


def _owners(shapes: list[tuple[int, ...]], ranks: int) -> list[int]:
    """Which rank orthogonalises which matrix: the costliest first, each to the rank with the least to do."""
    # A step of the iteration on [m, n], m <= n, multiplies m m n, m m m and m m n.
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    load = [0] * ranks
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda each: (-costs[each], each)):
        owners[index] = load.index(min(load))
        load[owners[index]] += costs[index]
    return owners


class Adafactor(_OnShares):
    """`torch.optim.Adafactor` (Shazeer and Stern 2018) on shares.

    Its row and column factors, its scale by the size of the parameter and its clipping are of the whole parameter: the
    gradient and the parameter are gathered, one parameter at a time, and every rank makes the whole update and takes its
    own share. `row_var` and `col_var` are kept whole and flat on every rank, `variance` of a vector in shares.
    """

    def __init__(self, groups: ParameterGroups, store: ParameterStore, **settings: Any) -> None:
        checked = torch.optim.Adafactor([torch.zeros(1)], **settings)
        super().__init__(groups, store, checked.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step. `closure` is not taken: gradients are there already."""
        assert closure is None
        for entry, parameter, gradient, group in self.with_gradient():
            whole = nn.Parameter(self.store.whole(entry.name, parameter.detach()).clone())
            whole.grad = self.store.whole(entry.name, gradient)
            options = {key: value for key, value in group.items() if key in self.defaults}
            inner = torch.optim.Adafactor([whole], **options)
            state = self.state[parameter]
            if state:
                inner.state[whole] = self._taken(entry, state)
            inner.step()
            for key, value in inner.state[whole].items():
                state[key] = self._kept(entry, key, value)
            parameter.copy_(self.store.share(entry.name, whole.detach()).reshape(parameter.shape))
        return None

    def _kept(self, entry: Entry, key: str, value: Tensor) -> Tensor:
        """The form in which a state is kept between steps. A factor [1, n] that is kept so could be taken for a share of
        the parameter that has one row; flat it cannot."""
        if key == "variance":
            share = self.store.share(entry.name, value).reshape(entry.parameter.shape)
            return share.to(entry.parameter.device, copy=True)
        return value.flatten() if key in ("row_var", "col_var") else value

    def _taken(self, entry: Entry, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shape = list(entry.layout.info.shape)
        found = dict(state)
        if "variance" in found:
            found["variance"] = self.store.whole(entry.name, found["variance"]).clone()
        if "row_var" in found:
            device = self.store.groups.device
            found["row_var"] = found["row_var"].to(device).view(*shape[:-1], 1)
            found["col_var"] = found["col_var"].to(device).view(*shape[:-2], 1, shape[-1])
        return found


class Together(Optimizer):
    """Several optimizers over different parameters as one: their groups in order, their states in one dict."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for each in self.optimizers for group in each.param_groups], {})
        self._share()

    def _share(self) -> None:
        """State and groups of the parts are those of the whole: schedules and checkpoints see only the whole."""
        groups = iter(self.param_groups)
        for each in self.optimizers:
            each.state = self.state
            each.param_groups = [next(groups) for _ in each.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for each in self.optimizers:
            each.step()
        return None
