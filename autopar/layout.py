"""Layout: how one training step is laid out on a cluster, in the terms people use for it; torch-free.

    Layout.parse("tp=8,pp=16,vpp=8,cp=1,dp=128,zero=1,mbs=1,recompute=none,precision=bf16")

A Layout says nothing of the model or the cluster; `check` says whether it can run a workload on a cluster.
Rank order, innermost first: tp, cp, dp, pp (Megatron's default), or with `order=dp-outer` tp, cp, pp, dp; ep and etp are
cut out of tp x cp x dp.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, replace

from autopar.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp8", "mxfp8", "nvfp4")
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
OFFLOAD = ("none", "optimizer", "activations", "all")
ORDERS = ("pp-outer", "dp-outer")
MOST_CUTS = 100_000  # virtual stages in a text
MOST = 10**9  # of any count; more is a slip of the hand, and no number of a cost model
_COUNTS = ("dp", "tp", "cp", "pp", "vpp", "ep", "etp", "mbs")


@dataclass(frozen=True)
class Layout:
    """One layout. The world is dp * tp * cp * pp ranks.

    dp         data-parallel replicas; tp: tensor; cp: context (sequence in attention); pp: pipeline stages
    vpp        virtual stages (model chunks) per rank; 2 for zbv and dualpipev, whose chunks fold back
    ep, etp    expert parallel and tensor parallel inside an expert: ep * etp divides dp * cp * tp
    zero       0 replicated, 1 optimizer state split, 2 gradients too, 3 parameters too, over the data ranks
    shard      of zero: ranks that hold one whole copy together (hybrid shard); 0 means all dp * cp
    mbs        sequences of one micro-batch per data rank
    recompute  none, selective (attention and the cheap ops around it) or full, of `recompute_layers` layers per
               stage (None: all)
    sp         whether norms and residuals are split over the sequence by tp
    offload    what lies in host memory between its uses
    order      whether pp or dp is outermost in rank: which of the two lies on the faster links
    cuts       layers per virtual stage in model order (pp * vpp numbers; `4x3/3` is 4/4/4/3) where they are not as even as can be
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    shard: int = 0
    mbs: int = 1
    recompute: str = "none"
    recompute_layers: int | None = None
    precision: str = "bf16"
    schedule: str = "1f1b"
    sp: bool = True
    offload: str = "none"
    order: str = "pp-outer"
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _counted(name, getattr(self, name), 1)
        _counted("shard", self.shard, 0)
        _counted("recompute_layers", self.recompute_layers or 0, 0)
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"zero is {self.zero}, expected 0, 1, 2 or 3", where="layout", hint="zero=1")
        for name, known in (
            ("precision", PRECISIONS),
            ("recompute", RECOMPUTE),
            ("schedule", SCHEDULES),
            ("offload", OFFLOAD),
            ("order", ORDERS),
        ):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name} is {getattr(self, name)!r}", where="layout", hint=f"one of {', '.join(known)}"
                )
        if self.cuts and len(self.cuts) != self.pp * self.vpp:
            raise UsageError(
                f"cuts has {len(self.cuts)} numbers, expected pp * vpp = {self.pp * self.vpp}",
                where="layout",
                hint="a number of layers per virtual stage, or to leave cuts out",
            )

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks over which dense parameters are replicated or sharded by ZeRO."""
        return self.dp * self.cp

    @property
    def fsdp(self) -> int:
        """Replicas that hold one copy of the parameters together, each with the cp ranks beside it; 1 below ZeRO-3."""
        return max(1, (self.shard or self.data_ranks) // self.cp) if self.zero == 3 else 1

    def mesh_sizes(self) -> dict[str, int]:
        """Sizes of the mesh axes, outermost first: where dp is outermost, pp lies inside of it and fsdp."""
        data = {"dp": self.dp // self.fsdp, "fsdp": self.fsdp}
        stages = {"pp": self.pp}
        outer = data | stages if self.order == "dp-outer" else stages | data
        return outer | {"cp": self.cp, "tp": self.tp}

    @property
    def expert_ways(self) -> int:
        """Over how many data ranks the runtime splits experts: with whole experts on each rank of tp (etp=1), those of
        tp have other ones already."""
        apart = self.etp == 1 and self.tp > 1 and self.ep % self.tp == 0
        return math.gcd(self.ep // self.tp if apart else self.ep, self.fsdp if self.fsdp > 1 else self.dp)

    def run_sizes(self) -> dict[str, int]:
        """Sizes of the mesh that the runtime joins, outermost first: data ranks that have other experts are the axis
        ep. `why_not_run` says whether that is this layout."""
        ways, fsdp = self.expert_ways, self.fsdp
        data = {
            "dp": self.dp // fsdp if fsdp > 1 else self.dp // ways,
            "fsdp": fsdp // ways if fsdp > 1 else 1,
            "ep": ways,
        }
        stages = {"pp": self.pp}
        outer = data | stages if self.order == "dp-outer" else stages | data
        return outer | {"cp": self.cp, "tp": self.tp}

    def why_not_run(self) -> str | None:
        """What of it the runtime does not run, or None."""
        whole = self.expert_ways * (self.tp if self.etp == 1 else 1) == self.ep
        wants = (
            (self.ep > 1 and (self.etp not in (1, self.tp) or not whole), f"ep={self.ep}, etp={self.etp}"),
            (self.precision not in ("fp32", "bf16", "fp8"), f"precision={self.precision}"),
        )
        return next((text for wanted, text in wants if wanted), None)

    def __str__(self) -> str:
        """The text form; what has its default is left out, but for dp, tp, pp, zero, mbs, recompute and precision."""
        always = {"dp", "tp", "pp", "zero", "mbs", "recompute", "precision"}
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in always and value == field.default:
                continue
            if field.name == "cuts":
                runs = [(count, len(list(same))) for count, same in itertools.groupby(value)]
                value = "/".join(f"{count}x{times}" if times > 1 else str(count) for count, times in runs)
            elif field.name == "sp":
                value = int(value)
            words.append(f"{field.name}={value}")
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the text form. Raises UsageError for what it does not know."""
        values: dict[str, object] = {}
        known = {field.name: field for field in dataclasses.fields(cls)}
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (part.strip() for part in word.partition("="))
            if name not in known or not equals:
                raise UsageError(
                    f"{word!r} is no part of a layout",
                    where="layout",
                    hint=f"NAME=VALUE with {', '.join(known)}",
                )
            if name in values:
                raise UsageError(f"{name} is given twice", where="layout", hint=f"one {name}=..")
            values[name] = _value(name, value)
        if values.get("vpp", 1) != 1 and "schedule" not in values:
            values["schedule"] = "interleaved"
        return cls(**values)  # type: ignore[arg-type]

    def with_(self, **changes: object) -> Layout:
        return replace(self, **changes)  # type: ignore[arg-type]


def _counted(name: str, value: int, least: int) -> None:
    if not least <= value <= MOST:
        raise UsageError(
            f"{name} is {value}, expected {least} or more" + (f", at most {MOST}" if value > MOST else ""),
            where="layout",
            hint=f"{name}=1",
        )


def _value(name: str, text: str) -> object:
    if name in ("precision", "recompute", "schedule", "offload", "order"):
        return text
    try:
        if name == "cuts":
            runs = [part.split("x") for part in text.split("/")]
            counts = [(int(run[0]), int(run[1]) if len(run) > 1 else 1) for run in runs]
            if sum(times for _, times in counts) > MOST_CUTS or any(
                pair[0] < 0 or pair[1] < 1 for pair in counts
            ):
                raise ValueError
            return tuple(count for count, times in counts for _ in range(times))
        if name == "recompute_layers" and text == "None":
            return None
        number = int(text)
        if name == "sp" and number not in (0, 1):
            raise ValueError
    except ValueError:
        what = {"cuts": "no list of whole numbers", "sp": "neither 0 nor 1"}.get(name, "not a whole number")
        shape = "4/4/3, or 4x2/3" if name == "cuts" else "1"
        raise UsageError(f"{name}={text} is {what}", where="layout", hint=f"{name}={shape}") from None
    return bool(number) if name == "sp" else number
