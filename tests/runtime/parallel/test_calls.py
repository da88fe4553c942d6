"""What rank 0 sends and what another rank holds, in one process: nothing is kept longer than rank 0 needs it."""

import gc
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from magicdec.errors import EngineError
from magicdec.runtime.parallel.calls import Forget, Forward, Load, ReadKeys, Stop
from magicdec.runtime.parallel.leader import Leader, ParallelRunner
from magicdec.runtime.parallel.worker import Worker
from magicdec.runtime.runners.opening import RunnerSpec, open_runner
from tests.runtime.parallel.pairs import BLOCK_SIZE, build, float64_spec, passes


class Line:
    """Stands where `Ranks` stand, on both ends: what one sends the other receives, as bytes."""

    rank, size, local_rank = 0, 1, 0

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.comm = self

    def send(self, message: object) -> None:
        self.sent.append(pickle.dumps(message))

    def receive(self) -> Any:
        return pickle.loads(self.sent.pop(0))

    @contextmanager
    def or_end_all(self, doing: str) -> Iterator[None]:
        assert doing
        yield

    def gather_texts(self, text: str, doing: str) -> list[str]:
        assert doing
        return [text]

    def Iallgather(self, mine: Any, everyone: Any) -> None:
        everyone[0] = mine

    def wait(self, request: None, doing: str, *, timeout: float) -> None:
        assert request is None
        assert doing
        assert timeout > 0

    def Split(self, color: int, key: int) -> "Line":
        assert (color, key) == (0, 0)
        return self

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1


class Ends:
    """Rank 0 and a worker at the two ends of a line, both with the same engine."""

    def __init__(self, directory: Path) -> None:
        self.line = line = Line()
        self.leader, self.worker = Leader(line), Worker(line)  # type: ignore[arg-type]
        self.spec = float64_spec(build(directory, "self", 1))

    def runner(self) -> ParallelRunner:
        number = self.leader.new_number()
        self.line.send(Load(number, self.spec, 1, "cpu"))
        return ParallelRunner(self.leader, number, open_runner(self.spec), 1)

    def deliver(self) -> None:
        self.line.send(Stop())
        self.worker.serve()

    def held(self) -> tuple[int, int]:
        """Runners and keys on the worker."""
        gc.collect()
        return len(self.worker._runners), len(self.worker._keys)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    before = signal.getsignal(signal.SIGINT)
    yield Ends(tmp_path)
    signal.signal(signal.SIGINT, before)  # a worker leaves it to rank 0


def test_inputs_arrive_as_they_were() -> None:
    for inputs in passes():
        arrived = pickle.loads(pickle.dumps(Forward.of(3, inputs))).inputs
        for name, value in vars(inputs).items():
            assert torch.equal(getattr(arrived, name), value), name


def test_the_worker_does_as_rank_0(ends: Ends) -> None:
    runner = ends.runner()
    slots = list(range(7 * BLOCK_SIZE, 8 * BLOCK_SIZE))  # of block 7, the first of the first sequence
    runner.forward(passes()[0])
    runner.forward(passes()[1])
    keys = runner.read_keys(slots, list(range(16)))
    runner.write_keys(slots, list(range(20, 36)), keys)
    ends.deliver()
    (theirs,) = ends.worker._runners.values()
    mine: Any = runner._local
    assert torch.equal(theirs.cache.keys[:, :, slots], mine.cache.keys[:, :, slots])  # type: ignore[attr-defined]
    fresh = open_runner(ends.spec)
    for inputs in passes()[:2]:
        fresh.forward(inputs)
    unmoved = fresh.cache.keys[:, :, slots]  # type: ignore[attr-defined]
    assert not torch.allclose(mine.cache.keys[:, :, slots], unmoved), "the keys have not moved"


def test_what_rank_0_drops_is_freed_with_the_next_call(ends: Ends) -> None:
    first, second = ends.runner(), ends.runner()
    first.forward(passes()[0])
    slots, positions = list(range(112, 120)), list(range(8))
    kept, dropped = first.read_keys(slots, positions), first.read_keys(slots, positions)
    ends.deliver()
    assert ends.held() == (2, 2)
    del dropped
    first.forward(passes()[0])
    ends.deliver()
    assert ends.held() == (2, 1)
    first.write_keys(slots, positions, kept)  # the other keys are still there
    del kept, second
    gc.collect()
    first.forward(passes()[0])
    ends.deliver()
    assert ends.held() == (1, 0)


def test_nothing_is_sent_that_nobody_dropped(ends: Ends) -> None:
    runner = ends.runner()
    runner.forward(passes()[0])
    runner.read_keys([0], [0])
    sent = [type(pickle.loads(message)) for message in ends.line.sent]
    assert sent == [Load, Forward, ReadKeys]
    runner.forward(passes()[0])
    assert isinstance(pickle.loads(ends.line.sent[-2]), Forget)


def test_no_calls_after_the_end(ends: Ends) -> None:
    runner = ends.runner()
    ends.leader.stop()
    ends.leader.stop()
    assert sum(isinstance(pickle.loads(message), Stop) for message in ends.line.sent) == 1
    with pytest.raises(EngineError, match="have been stopped"):
        runner.forward(passes()[0])


def test_a_model_for_more_ranks_than_there_are_is_refused(ends: Ends, tmp_path: Path) -> None:
    engine = build(tmp_path, "self", 2)
    with pytest.raises(EngineError, match=r"target was built for 2 tensor-parallel ranks, and 1 runs; start it with"):
        ends.leader.open(RunnerSpec(engine / "target", 4, BLOCK_SIZE))
