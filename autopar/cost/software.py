"""Software: what a training stack does to the hardware's speed and memory, as few constants per kind and era.

In:  the name of a framework, the date of its release and what a run says of itself.
Out: a Software: which attention kernel it has, what it overlaps, what it keeps.

The constants are fitted or taken from public descriptions; `software.toml` holds them with their sources.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from autopar.errors import UsageError


@dataclass(frozen=True)
class Software:
    """One training stack at one time.

    attention        unfused, flash1, flash2 or flash3 (cuDNN's fused kernels count as flash3 on Hopper and later)
    gradient_bytes   per element of the gradient buffer; master: whether fp32 masters lie beside 16-bit weights
    weight_bytes     per element of what a rank stores as weights (4 where the stored weights are the fp32 masters)
    optimizer_bytes  per element that a rank updates, while the optimizer steps
    loss_bytes       per logit at the loss: 16-bit logits and the fp32 softmax, made in place (6), and further copies
    weight_gradient_copy  share of a product's weight gradient that lies in memory before it is added to the buffer
    offloaded        share of the activations that a layout with offload moves to the host
    keeps_quantized  whether 8-bit products keep their operands in 8 bits for the backward
    keeps_gathered   whether ZeRO-3 under a pipeline keeps parameters and gradients whole through a step
    workspace_bytes  fixed workspaces of the math libraries: cuBLAS's 32 MiB for the forward's and the backward's thread,
                     Transformer Engine's 32 MiB; expert_workspace_bytes: of the four streams of grouped products
    fragmentation    bytes that the allocator holds beyond the tensors that come and go, as a share of those
    reduce_bytes     per element of a gradient as it is sent
    matmul           speed of the era's matmul kernels beside those of the device file
    kernel_s         seconds the host needs per kernel it launches (near 0 with graphs)
    launch           the device's own seconds per kernel, as a multiple of the device file's
    stream           speed of pointwise kernels beside ideally fused ones
    grouped          speed of a product over many experts beside a single product of the same size
    quantize         traffic of quantizing for 8-bit products beside one pass per operand
    accumulate_bytes per element of a weight gradient that is added to a buffer after each micro-batch
    expert_s         seconds per layer with experts, each way, that the host waits for counts and sorts
    expert_stream    speed of what surrounds experts (routing, permuting, activation, quantizing) beside `stream`
    scan             speed of the kernels of a state-space scan beside `stream`
    expert_kernels   launches per local expert and product, where no kernel takes all at once (thrice in 8 bits)
    selective_matmul share of the matmuls that selective recompute runs again
    tp_exposed       share of tensor-parallel traffic that no compute hides
    cp_exposed, ep_exposed, pp_exposed   likewise, of context, expert and pipeline traffic
    distinct         1 where a token goes once to each rank (and node) that holds its experts, 0 once to each expert
    dp_window        share of the last micro-batch's backward that can hide gradient reduction
    gather_window    share of the first micro-batch's forward that can hide the gather of updated parameters
    gather_rank_s    seconds per rank of that gather, where each rank broadcasts its own part
    dp_exposed       share of data-parallel traffic that stays exposed however long the window is
    fsdp_window      share of compute that can hide parameter gathers (ZeRO-3)
    contention       compute lost per second of hidden traffic, as kernels share the device
    step_s           fixed seconds per step (clip, logging, data), step_share the part proportional to its time
    straggle         share of the step that each doubling of the nodes adds, as all wait for the slowest
    """

    name: str
    attention: str = "flash3"
    gradient_bytes: float = 4.0
    master: bool = True
    weight_bytes: float = 2.0
    optimizer_bytes: float = 0.0
    loss_bytes: float = 6.0
    weight_gradient_copy: float = 1.0
    offloaded: float = 1.0
    keeps_gathered: bool = False
    keeps_quantized: bool = True
    workspace_bytes: float = 9e7
    expert_workspace_bytes: float = 1.2e8
    fragmentation: float = 0.08
    reduce_bytes: float = 4.0
    matmul: float = 1.0
    kernel_s: float = 4e-6
    launch: float = 1.0
    stream: float = 1.0
    grouped: float = 0.9
    quantize: float = 1.0
    accumulate_bytes: float = 8.0
    expert_s: float = 0.0
    expert_stream: float = 1.0
    expert_kernels: float = 0.0
    scan: float = 0.7
    selective_matmul: float = 0.0
    tp_exposed: float = 0.5
    cp_exposed: float = 0.5
    ep_exposed: float = 1.0
    pp_exposed: float = 0.5
    distinct: float = 0.0
    dp_window: float = 0.8
    gather_window: float = 0.8
    gather_rank_s: float = 0.0
    dp_exposed: float = 0.05
    fsdp_window: float = 0.8
    contention: float = 0.15
    step_s: float = 0.005
    step_share: float = 0.02
    straggle: float = 0.002

    def with_(self, **changes: Any) -> Software:
        return replace(self, **changes)


_FIELDS = frozenset(field.name for field in dataclasses.fields(Software)) - {"name"}


@cache
def software_data() -> dict[str, Any]:
    """`software.toml`."""
    return tomllib.loads(files("autopar.cost").joinpath("software.toml").read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    return tuple(software_data()["stack"])


def load_software(name: str, data: Mapping[str, Any] | None = None) -> Software:
    """A stack of software.toml by name. `data`: constants other than those of the file."""
    stacks = (software_data() if data is None else data)["stack"]
    if name not in stacks:
        raise UsageError(f"unknown software {name!r}", where="software", hint=f"one of {', '.join(stacks)}")
    values: dict[str, Any] = {}
    for older in ancestry(name, stacks):
        values = stacks[older] | values
    return Software(name=name, **{key: value for key, value in values.items() if key in _FIELDS})


def ancestry(name: str, stacks: Mapping[str, Any]) -> tuple[str, ...]:
    """A stack and those whose values it has where it states none: `like` names the next."""
    found: tuple[str, ...] = (name,)
    while (next_one := stacks[found[-1]].get("like")) and next_one not in found:
        found += (next_one,)
    return found


def default_software(device_name: str = "") -> Software:
    """The stack that plans are made for: TPUs run XLA, all else the newest Megatron-like stack."""
    return load_software("xla" if device_name.startswith("tpu") else "autopar")


def stack_of(framework: str, year: float, data: Mapping[str, Any] | None = None) -> str:
    """The stack that stands for a framework at a date: the latest of its family that is not newer, else its oldest."""
    data = software_data() if data is None else data
    family = data["framework"].get(framework, data["framework"]["other"])
    eras = sorted(
        (stack["since"], name) for name, stack in data["stack"].items() if stack.get("family") == family
    )
    fitting = [name for since, name in eras if since <= year]
    return str(fitting[-1] if fitting else eras[0][1])


def software_of(
    framework: str, year: float, options: Iterable[str] = (), data: Mapping[str, Any] | None = None
) -> Software:
    """The stack of a framework at a date, changed by its name and by what a run says of itself (`[option.*]` of
    software.toml)."""
    return changed(load_software(stack_of(framework, year, data), data), {framework, *options}, data)


def changed(software: Software, options: Iterable[str], data: Mapping[str, Any] | None = None) -> Software:
    """`software` with the changes of some options, in the order of their names; a framework's name is one too, and
    `activation-offload=0.3` is Software.offloaded."""
    known = (software_data() if data is None else data)["option"]
    for option in sorted(options):
        if option in known:
            changes = {key: value for key, value in known[option].items() if key in _FIELDS}
            software = replace(software, **changes)
        elif option.startswith("activation-offload="):
            software = replace(software, offloaded=float(option.partition("=")[2]))
    return software
