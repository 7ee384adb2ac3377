"""Settings for all tests: hypothesis draws the same examples each time, and a slow machine is not a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("autopar", deadline=None, derandomize=True)
settings.load_profile("autopar")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take longer than these models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
