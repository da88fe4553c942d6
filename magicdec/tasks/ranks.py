"""Commands under `mpiexec`."""


def leave_if_not_first() -> None:
    """End here as one that serves rank 0, unless this process is rank 0 (or alone), which reads prompts and prints."""
    from magicdec.runtime.parallel.mpi import num_launched

    if num_launched() > 1:
        from magicdec.runtime.parallel.leader import join_ranks

        join_ranks()
