"""Memory bound to engines: places, staging in one copy, and the keys of the pool."""

import pytest
import torch

from magicdec.errors import EngineError
from magicdec.plugins.hadamard import Hadamard
from magicdec.plugins.rotary import Rotary, rotate
from magicdec.runtime.runners.trtllm.memory import Memory, Staging
from magicdec.runtime.runners.trtllm.pool import KVPool


def test_every_allocation_is_noted_with_its_place() -> None:
    memory = Memory("cpu", allow_cpu=True)
    device, host = memory.device((3, 4), torch.int32), memory.host((5,), torch.int64)
    assert memory.allocations == [(device.data_ptr(), 48, "device"), (host.data_ptr(), 40, "host")]
    assert memory.stream == 0


def test_engines_run_on_gpus_only() -> None:
    with pytest.raises(EngineError, match="device='cpu': TensorRT engines run on NVIDIA GPUs"):
        Memory("cpu")


def test_staging_hands_over_each_tensor_in_its_place() -> None:
    memory = Memory("cpu", allow_cpu=True)
    staging = Staging(memory, 192)
    staging.begin()
    first = staging.put(torch.arange(6, dtype=torch.int32).view(2, 3))
    second = staging.put(torch.tensor([7, 8], dtype=torch.int32))
    assert not first[1].any(), "nothing is on the device before the upload"
    staging.upload()
    for host, device in (first, second):
        assert torch.equal(host, device)
        assert host.data_ptr() != device.data_ptr()
    assert first[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second[1].data_ptr() - first[1].data_ptr() == 256  # TensorRT's alignment


def test_a_step_is_written_beside_the_last_ones_copy() -> None:
    memory = Memory("cpu", allow_cpu=True)
    staging = Staging(memory, 64)
    homes = []
    for value in range(3):
        staging.begin()
        homes.append(staging.put(torch.tensor([value], dtype=torch.int32))[0])
        staging.upload()
        staging.end()
    assert homes[1].item() == 1, "the last step's host tensors may still be being read"
    assert homes[0].data_ptr() == homes[2].data_ptr() != homes[1].data_ptr()
    assert len(memory.allocations) == 3


def test_staging_refuses_more_than_it_was_sized_for() -> None:
    staging = Staging(Memory("cpu", allow_cpu=True), 64)
    staging.begin()
    staging.put(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(AssertionError, match="staging"):
        staging.put(torch.zeros(1, dtype=torch.int32))


def make_pool(scales: torch.Tensor | None = None) -> KVPool:
    return KVPool(
        Memory("cpu", allow_cpu=True),
        num_blocks=6,
        num_layers=2,
        num_kv_heads=3,
        block_size=4,
        head_size=8,
        dtype=torch.float32,
        rotary=Rotary(8, 10000.0, None, torch.float32),
        scales=scales,
        max_slots=24,
    )


def test_keys_stand_in_the_layout_of_the_plugin() -> None:
    pool = make_pool()
    keys = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    pool.write_keys([9, 20], [5, 300], keys)  # block 2 offset 1, block 5 offset 0
    cos, sin = pool.rotary.angles(torch.tensor([5, 300]))
    rotated = rotate(keys, cos.squeeze(1), sin.squeeze(1))
    for layer in range(2):
        torch.testing.assert_close(pool.tensor[2, layer, 0, :, 1], rotated[layer, :, 0])
        torch.testing.assert_close(pool.tensor[5, layer, 0, :, 0], rotated[layer, :, 1])
    assert not pool.tensor[:, :, 1].any(), "values are not touched"
    assert pool.tensor.count_nonzero() == 2 * 2 * 3 * 8
    torch.testing.assert_close(pool.read_keys([20, 9], [300, 5]), keys.flip(2))


def test_an_fp8_pool_stores_one_byte_at_each_layers_scale() -> None:
    scales = torch.tensor([0.5, 0.01])
    pool = make_pool(scales)
    assert pool.num_bytes == 6 * 2 * 2 * 3 * 4 * 8
    turned = torch.zeros(2, 3, 1, 8)
    turned[0, :, 0, 0], turned[1, :, 0, 1] = 100.0, -3.0
    keys = Hadamard(8, torch.float32).turn_back(turned)
    pool.write_keys([7], [0], keys)  # position 0 rotates nothing
    stored = pool.tensor.view(torch.float8_e4m3fn)
    assert stored[1, 0, 0, 0, 3, 0].float() == 192  # 200 is between 192 and 208, and a tie goes to the even one
    assert stored[1, 1, 0, 0, 3, 1].float() == -288  # -300 rounds to -288
    turned[0, :, 0, 0], turned[1, :, 0, 1] = 96.0, -2.88
    torch.testing.assert_close(pool.read_keys([7], [0]), Hadamard(8, torch.float32).turn_back(turned))
    pool.write_keys([7], [0], keys * 100)
    assert stored[1, 0, 0, 0, 3, 0].float() == 448, "beyond the range is saturated, never NaN"


class Stream:
    """Counts what is issued; in place of CUDA's."""

    def __init__(self) -> None:
        self.issued = 0
        self.waits: list[int] = []


class RecordedMark:
    """In place of CUDA's event."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, 0

    def set(self) -> None:
        self.at = self.stream.issued

    def wait(self) -> None:
        self.stream.waits.append(self.at)


def test_a_host_buffer_is_written_again_only_after_all_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step n waits for step n - 2 as a whole, the engine's pass included, and never for step n - 1."""
    stream, memory = Stream(), Memory("cpu", allow_cpu=True)
    monkeypatch.setattr(memory, "mark", lambda: RecordedMark(stream))
    staging = Staging(memory, 64)
    for _ in range(4):
        staging.begin()
        staging.put(torch.zeros(1, dtype=torch.int32))
        staging.upload()
        stream.issued += 10  # the pass
        staging.end()
    assert stream.waits == [0, 0, 10, 20]
