"""Which layers of a config a tiny copy keeps: in their order, two of every kind.

In:  a config as a Tree, and what single layers have otherwise than the rest.
Out: the numbers of the layers that stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autopar.models.shrink_words import LAYER_NUMBERS, Tree, boundaries, depth_of, is_index_list, is_period

LAYERS = 4


def kept_layers(tree: Tree, overrides: Mapping[int, str], share: float | None = None) -> tuple[int, ...]:
    """Which of a config's layers stay: in their order, two of every kind where there are two; or the first `share`."""
    depth = depth_of(tree)
    if depth is None:
        return ()
    if share is not None:
        return tuple(range(max(min(depth, LAYERS), round(depth * share))))
    lists = [value for value in tree.values() if isinstance(value, list | tuple) and len(value) == depth]
    numbers = [
        value for name, value in tree.items() if LAYER_NUMBERS.fullmatch(name) and isinstance(value, int)
    ]
    indexed = [value for name, value in tree.items() if is_index_list(name, value, depth)]
    shared = tree.get("num_kv_shared_layers") or 0
    kinds = [
        (
            tuple(str(values[layer]) for values in lists if not is_index_list("_layers", values, depth)),
            tuple(layer < number for number in numbers),
            tuple(layer in values for values in indexed if len(values) != depth),
            overrides.get(layer),
            layer >= depth - shared,
        )
        for layer in range(depth)
    ]
    if len(set(kinds)) == 1 and any(is_period(name, value) for name, value in tree.items()):
        return tuple(range(min(depth, 2 * LAYERS)))
    bounds = [*boundaries(tree).values()]
    return representative(kinds, [tuple(layer < bound for bound in bounds) for layer in range(depth)])


def representative(kinds: Sequence[object], parts: Sequence[object] | None = None) -> tuple[int, ...]:
    """The numbers of layers that show every kind twice, and once in every part, in their order, in short runs.

    s s s s f s s s s f ... -> s f s f;  d d d m m m ... -> d d m m
    """
    both = list(zip(kinds, parts or [None] * len(kinds), strict=True))
    runs = [list(run) for _, run in itertools.groupby(range(len(kinds)), key=lambda layer: both[layer])]
    wanted = [
        (kind, [layer for layer in range(len(kinds)) if kinds[layer] == kind], 2) for kind in set(kinds)
    ]
    wanted += [(pair, [layer for layer in range(len(both)) if both[layer] == pair], 1) for pair in set(both)]
    least = min(LAYERS, len(kinds))

    def enough(chosen: Sequence[int]) -> bool:
        return len(chosen) >= least and all(
            len(set(chosen) & set(layers)) >= min(count, len(layers)) for _, layers, count in wanted
        )

    for longest in range(1, len(kinds) + 1):
        chosen: list[int] = []
        for run in runs:
            if enough(chosen):
                break
            chosen += run[:longest]
        if enough(chosen):
            return tuple(chosen)
    return tuple(range(len(kinds)))
