"""Attention for capture of Transformers models: one op per attention, masks only where there is something to mask.

In:  a (copied) Transformers model of any attention implementation that computes on the CPU (eager, sdpa, flex).
Out: inside the context, its attention is `autopar.attention` (see `autopar.functional`), with
     - causality and sliding windows as flags, where no padding and no packed sequences are masked too. At sequence 8192
       a mask is 64 MB per sequence that no rank then ever holds;
     - heads of keys as grouped as the model has them; softcap, sinks and position bias where it has them.

A model asks Transformers for two functions by the name of its implementation: one that makes masks and one that
computes attention. Both are replaced while it is captured. What a mask function says is recognised by what it is made
of (`causal_mask_function`, `sliding_window_overlay`, ...); a mask that says no more than flags can is made nevertheless,
with the flags noted on it, since a model may do more with it than hand it to attention. Attention takes the flags of
such a mask, and then nothing needs the mask. Eager functions are known by the names they use; one that uses others
does something else than this op, and is captured as it is written.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.functional import ATTENTION
from autopar.passes.ctc_capture import ctc_for_capture
from autopar.passes.mask_flags import Flags, note, noted
from autopar.passes.transformers_recurrences import short_recurrences
from autopar.rules.call import words

# What eager attention functions read and call (Transformers 5.24), and the arguments they have.
_NAMES = frozenset(
    words(
        "F attention cat contiguous dim dropout dtype expand float float32 functional head_dim key_states keepdim logsumexp "
        "matmul max nn num_key_value_groups repeat_kv reshape shape sigmoid sinks size softmax tanh to torch training "
        "transpose type unsqueeze values view hasattr getattr maybe_autocast device"
    )
)
_ARGUMENTS = frozenset(
    words(
        "module query key value query_states key_states value_states attention_mask scaling dropout softcap position_bias "
        "sinks s_aux sliding_window kwargs"
    )
)


# ---- masks -----------------------------------------------------------------------------------------------------------


def flags_of(arguments: dict[str, Any]) -> Flags | None:
    """What a mask says that is made with these arguments, if flags can say it."""
    query, key = arguments.get("q_length"), arguments.get("kv_length")
    if arguments.get("attention_mask") is not None or not isinstance(query, int) or not isinstance(key, int):
        return None
    for offset in ("q_offset", "kv_offset"):
        if not isinstance(arguments.get(offset, 0), int) or arguments.get(offset, 0) != 0:
            return None
    flags = _meaning(arguments.get("mask_function"), key)
    if flags is not None and flags.window is not None and flags.window >= max(query, key):
        return Flags(flags.causal)
    return flags


def _meaning(function: Any, keys: int) -> Flags | None:
    """What a mask function of Transformers says of `keys` keys."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is None or function is causal_mask_function:
        return Flags(True)
    if function is bidirectional_mask_function:
        return Flags(False)
    name, inside = getattr(function, "__qualname__", ""), _closure(function)
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return None  # it alone looks at all that is ahead
    if name != "and_masks.<locals>.and_mask" or set(inside) != {"mask_functions"}:
        return None
    parts = {getattr(part, "__qualname__", ""): part for part in inside["mask_functions"]}
    if len(parts) != len(inside["mask_functions"]) or len(parts) != 2:
        return None
    if causal_mask_function in parts.values():
        window = parts.get("sliding_window_overlay.<locals>.inner_mask")
        if window is not None:
            return _window(True, _closure(window).get("sliding_window"))
        chunk = parts.get("chunked_overlay.<locals>.inner_mask")
        size = _closure(chunk).get("chunk_size") if chunk is not None else None
        return Flags(True) if isinstance(size, int) and keys <= size else None
    if bidirectional_mask_function in parts.values():
        window = parts.get("sliding_window_bidirectional_overlay.<locals>.inner_mask")
        size = _closure(window).get("sliding_window") if window is not None else None
        return _window(False, size + 1) if isinstance(size, int) else None
    return None


def _window(causal: bool, size: Any) -> Flags | None:
    return Flags(causal, size) if isinstance(size, int) and size > 0 else None


def _closure(function: Any) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)


def _noted(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, noting on the mask what it says."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if isinstance(made, Tensor) and not args:
            note(made, flags_of(kwargs))
        return made

    return mask


def _sdpa_mask(**kwargs: Any) -> Tensor | None:
    """As outside of tracing: no mask where attention's own flag says all of it."""
    from transformers.masking_utils import sdpa_mask

    flags = flags_of(kwargs)
    if flags is not None and flags.window is None and kwargs.get("q_length") == kwargs.get("kv_length"):
        skip = "allow_is_causal_skip" if flags.causal else "allow_is_bidirectional_skip"
        if kwargs.get(skip, flags.causal):
            return None
    mask: Tensor | None = sdpa_mask(**kwargs)
    return mask


def _flex_mask(**kwargs: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )
    return mask


# ---- attention -------------------------------------------------------------------------------------------------------


def _one_op(original: Callable[..., Any], *, eager: bool, none_is_causal: bool) -> Callable[..., Any]:
    """`original` as one op, where that computes the same. `none_is_causal`: without a mask the module's `is_causal`
    counts, as for sdpa; else everything is visible."""
    names: frozenset[str] = frozenset()
    if eager:
        code = getattr(original, "__code__", None)
        parameters = frozenset(inspect.signature(original).parameters)
        names = frozenset(code.co_names) if code is not None else frozenset({"?"})
        if not (names <= _NAMES and parameters <= _ARGUMENTS):
            return original

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        known = _Call(module, query, key, value, attention_mask, kwargs, names)
        if args or not known.is_one_op(eager):
            return original(module, query, key, value, attention_mask, *args, **kwargs)  # type: ignore[no-any-return]
        return known.captured(none_is_causal).transpose(1, 2).contiguous(), None

    return attention


@dataclass(frozen=True)
class _Call:
    """One call of an attention function; `names`: what the eager function it stands for reads."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    names: frozenset[str]

    def is_one_op(self, eager: bool) -> bool:
        shapes = [tuple(tensor.shape) for tensor in (self.query, self.key, self.value)]
        if any(len(shape) != 4 for shape in shapes) or self.query.dtype != self.key.dtype:
            return False
        (batch, heads, _, width), keys, values = shapes
        dropout = self.options.get("dropout") or 0.0
        scale = self.options.get("scaling")
        return (
            keys[:3] == values[:3]
            and keys[0] == batch
            and keys[3] == width
            and heads % keys[1] == 0
            and not (dropout and (self.module.training or not eager))
            and (scale is None or isinstance(scale, (int, float)))
            and not self.options.get("output_attentions")
            and (self.mask is None or isinstance(self.mask, Tensor))
        )

    def captured(self, none_is_causal: bool) -> Tensor:
        flags = self._flags(none_is_causal)
        mask = self._mask()
        sinks = self.options.get("s_aux")
        if sinks is None:
            sinks = self.options.get("sinks")
        if sinks is None and "sinks" in self.names:
            sinks = getattr(self.module, "sinks", None)
        scale = self.options.get("scaling")
        if scale is None and "head_dim" in self.names:
            scale = float(self.module.head_dim) ** -0.5  # type: ignore[arg-type]
        softcap = self.options.get("softcap")
        result: Tensor = ATTENTION(
            self.query,
            self.key,
            self.value,
            mask,
            sinks,
            flags.causal,
            flags.window,
            None if scale is None else float(scale),
            None if softcap is None else float(softcap),
        )
        return result

    def _flags(self, none_is_causal: bool) -> Flags:
        flags = noted(self.mask)
        if flags is not None:
            return flags
        causal = self.options.get("is_causal")
        if causal is None:
            causal = getattr(self.module, "is_causal", True)
        return Flags(none_is_causal and self.mask is None and bool(causal) and self.query.shape[2] > 1)

    def _mask(self) -> Tensor | None:
        """What the flags do not say: the mask's tensor and the bias of positions, as one."""
        mask = self.mask if noted(self.mask) is None else None
        bias: Tensor | None = self.options.get("position_bias")
        if bias is None or mask is None:
            return mask if bias is None else bias
        if mask.dtype == torch.bool:
            return torch.where(mask, bias, torch.finfo(self.key.dtype).min)
        return bias + mask


# ---- while capturing -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attention_for_capture(model: nn.Module, packed: bool) -> Iterator[None]:
    """Capture the attention of Transformers models as one op; unless `packed`, skip the search for sequences packed
    into one row, which needs position ids given by the caller."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    computes, makes = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = dict(computes), dict(makes)
    get_interface, find = AttentionInterface.get_interface, masking_utils.find_packed_sequence_indices

    def with_eager(self: Any, implementation: Any, default: Any) -> Any:
        found = get_interface(self, implementation, default)
        if found is default and implementation in (None, "eager"):
            return _one_op(found, eager=True, none_is_causal=False)
        return found

    computes["sdpa"] = _one_op(before[0]["sdpa"], eager=False, none_is_causal=True)
    computes["flex_attention"] = _one_op(before[0]["flex_attention"], eager=False, none_is_causal=False)
    makes["sdpa"], makes["flex_attention"] = _noted(_sdpa_mask), _noted(_flex_mask)
    makes["eager"] = _noted(before[1]["eager"])
    AttentionInterface.get_interface = with_eager
    if not packed:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        computes.update(before[0])
        makes.update(before[1])
        AttentionInterface.get_interface = get_interface
        masking_utils.find_packed_sequence_indices = find


@contextlib.contextmanager
def losses_and_attention(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """While capturing: CTC losses are one op; with a Transformers model in the module attention is one too, causality and
    windows are flags instead of a mask tensor, grouped key/value heads stay grouped, and recurrences are short.

    Tracing makes Transformers build masks it would skip in eager mode, because it cannot look at values: one for
    padding that may not be there and one for sequences packed into a row. Without an attention mask there is no
    padding, and without position ids there are no packed sequences.
    """
    theirs = ("transformers.", "transformers_modules")
    with ctc_for_capture():
        if not any(type(module).__module__.startswith(theirs) for module in model.modules()):
            yield
            return
        with attention_for_capture(model, "position_ids" in inputs), short_recurrences(model):
            yield
