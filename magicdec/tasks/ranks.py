"""Commands under `mpiexec`."""


def leave_if_not_first() -> None:
    """Of the processes that mpiexec started, rank 0 reads the prompt and prints; the others serve it and end here."""
    from magicdec.runtime.parallel.mpi import num_launched

    if num_launched() > 1:
        from magicdec.runtime.parallel.leader import join_ranks

        join_ranks()
