"""How OpenMP's threads wait for each other on a CPU that others use as well."""

import os


def wait_politely() -> None:
    """Let idle OpenMP threads spin for microseconds and then sleep; to be called before torch is imported.

    GNU OpenMP spins for milliseconds by default. Beside one busy process a thread that spins takes the core from the
    one that it waits for: a decode step of SmolLM2 on two cores took 430 ms and more instead of 45, and with this
    setting 43, busy or quiet. A value that the user has set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
