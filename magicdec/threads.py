"""How OpenMP's threads wait for each other on a CPU that others use as well."""

import os


def wait_politely() -> None:
    """Let idle OpenMP threads spin for microseconds and then sleep; to be called before torch is imported.

    GNU OpenMP spins for milliseconds by default. Beside one busy process a thread that spins takes the core from the
    one that it waits for: SmolLM2 on two cores beside a busy process made 1.3 to 2.3 tokens a second, and 17 to 23 with
    this setting. A value that the user has set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
