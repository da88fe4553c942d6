"""The communicators on three real ranks; what is checked stands in rank_sums.py."""

from tests.runtime.parallel.launch import run_ok


def test_sums_and_joins() -> None:
    run_ok(3, "tests.runtime.parallel.rank_sums")
