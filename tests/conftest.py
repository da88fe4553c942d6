"""Settings for all tests: hypothesis draws the same examples in every run, and keeps no clock; threads sleep early."""

from hypothesis import settings

from magicdec.threads import wait_politely

wait_politely()  # before any test module imports torch

from tests.standin.fixture import standin  # noqa: E402  a fixture

__all__ = ["standin"]
settings.register_profile("fixed", deadline=None, derandomize=True, database=None, print_blob=False)
settings.load_profile("fixed")
