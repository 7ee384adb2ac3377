"""Settings for all tests: hypothesis draws the same examples each time, and a slow machine is not a failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("autopar", deadline=None, derandomize=True)
settings.load_profile("autopar")
