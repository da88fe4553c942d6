"""How a build says how far it is."""

from collections.abc import Callable

OnBuildProgress = Callable[[str, int, int], None]  # stage, done, in all
