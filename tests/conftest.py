"""Settings for all tests: hypothesis draws the same examples each time, and a slow machine is not a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from autopar import prepared

settings.register_profile("autopar", deadline=None, derandomize=True)
settings.load_profile("autopar")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take longer than these models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def captured_once() -> Iterator[None]:
    """The same model in the same shapes is captured once, however many meshes it is planned for."""
    known: dict[object, Any] = {}
    capture = prepared.capture

    def cached(model: torch.nn.Module, inputs: dict[str, Any], **options: Any) -> Any:
        shapes = [(name, tuple(item.shape)) for name, item in (*model.named_parameters(), *inputs.items())]
        key = (*shapes, *sorted(options.items(), key=str))
        if key not in known:
            known[key] = capture(model, inputs, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "capture", cached)
        yield
