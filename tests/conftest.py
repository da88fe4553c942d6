"""Settings for all tests: hypothesis draws the same examples in every run, and keeps no clock."""

from hypothesis import settings

settings.register_profile("fixed", deadline=None, derandomize=True, database=None, print_blob=False)
settings.load_profile("fixed")
