"""The native paged attention kernel: near float64, and a row's bits the same whatever shares its pass."""

import ctypes
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.errors import EngineError
from magicdec.plugins.attention import SequenceViews, paged_attention, reference_attention, sequence_views
from magicdec.plugins.cpu import attention as native_attention
from magicdec.plugins.cpu.attention import PagedSequences
from magicdec.plugins.cpu.library import ISAS, best_isa, native, set_isa
from magicdec.plugins.fp8 import FP8

LIBRARY = native()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library was not built")

KINDS = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "bfloat16 over fp8": (torch.bfloat16, FP8),
    "float32 over fp8": (torch.float32, FP8),
    "float16 over fp8": (torch.float16, FP8),
}
# Around the ends of tiles (128 keys) and splits (256, 512, 1024, 2048 ...), and far from them.
EDGES = sorted({max(0, edge + near) for edge in (0, 128, 256, 384, 512, 1024, 2048) for near in (-2, -1, 0, 1, 30)})


def library() -> ctypes.CDLL:
    assert LIBRARY is not None
    return LIBRARY


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this CPU has, in turn."""
    before = best_isa(library())
    try:
        set_isa(library(), request.param)
    except EngineError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    set_isa(library(), before)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    library().magicdec_set_num_threads(torch.get_num_threads())


@dataclass
class Scene:
    """Sequences in a pool whose other slots hold NaN, in blocks that lie in any order."""

    rows: Sequence[int]
    cache_lens: Sequence[int]
    kind: str = "float32"
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    seed: int = 0
    trees: list[torch.Tensor | None] | None = None
    query: torch.Tensor = field(init=False)
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    blocks: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        draws = torch.Generator().manual_seed(self.seed)
        query_type, cache_type = KINDS[self.kind]
        lengths = [rows + cached for rows, cached in zip(self.rows, self.cache_lens, strict=True)]
        needed = [-(-length // self.block_size) for length in lengths]
        order = iter(torch.randperm(sum(needed) + 3, generator=draws).tolist())
        self.blocks = [[next(order) for _ in range(count)] for count in needed]
        shape = (self.kv_heads, (sum(needed) + 3) * self.block_size, self.head_size)
        self.keys, self.values = (torch.full(shape, torch.nan).to(cache_type) for _ in range(2))
        for index, length in enumerate(lengths):
            for cache in (self.keys, self.values):
                entries = torch.randn(self.kv_heads, length, self.head_size, generator=draws).to(cache_type)
                if cache_type == FP8:
                    cache.view(torch.uint8)[:, self.slots(index)] = entries.view(torch.uint8)
                else:
                    cache[:, self.slots(index)] = entries
        scale = 1.5 * self.head_size**-0.5
        query = torch.randn(sum(self.rows), self.heads, self.head_size, generator=draws) * scale
        self.query = query.to(query_type)

    @property
    def starts(self) -> list[int]:
        return [sum(self.rows[:index]) for index in range(len(self.rows) + 1)]

    @property
    def views(self) -> SequenceViews:
        return sequence_views(self.starts, self.cache_lens, self.blocks, self.block_size)

    def slots(self, index: int) -> list[int]:
        length = self.cache_lens[index] + self.rows[index]
        return [self.blocks[index][p // self.block_size] * self.block_size + p % self.block_size for p in range(length)]

    def run(self, value_scale: float = 1.0) -> torch.Tensor:
        sequences = PagedSequences(self.starts, self.cache_lens, self.blocks, self.block_size, self.trees)
        return native_attention.paged_attention(library(), self.query, self.keys, self.values, sequences, value_scale)

    def run_rows(self, first: int, last: int, others: "Scene | None" = None) -> torch.Tensor:
        """Rows first .. last of the only sequence, the later ones not yet written; beside others' sequences."""
        assert len(self.rows) == 1
        seen = self.cache_lens[0] + last
        keys, values = self.keys.clone(), self.values.clone()
        for cache in (keys, values):
            nan = torch.full((1,), torch.nan).to(cache.dtype)
            view = cache.view(torch.uint8) if cache.dtype == FP8 else cache
            view[:, self.slots(0)[seen:]] = (nan.view(torch.uint8) if cache.dtype == FP8 else nan)[0]
        starts, cache_lens = [0, last - first], [self.cache_lens[0] + first]
        blocks, query = [self.blocks[0]], self.query[first:last]
        if others is not None:
            starts += [last - first + start for start in others.starts[1:]]
            cache_lens += others.cache_lens
            blocks += [[block + keys.shape[1] // self.block_size for block in row] for row in others.blocks]
            query = torch.cat([query, others.query])
            keys, values = (
                torch.cat([mine.view(torch.uint8), its.view(torch.uint8)], dim=1).view(mine.dtype)
                for mine, its in ((keys, others.keys), (values, others.values))
            )
        sequences = PagedSequences(starts, cache_lens, blocks, self.block_size)
        return native_attention.paged_attention(library(), query, keys, values, sequences)[: last - first]

    def exact(self) -> torch.Tensor:
        """In float64, written as plainly as can be."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        for index, cached in enumerate(self.cache_lens):
            slots = self.slots(index)
            keys, values = (cache.to(torch.float64)[:, slots] for cache in (self.keys, self.values))
            tree = self.trees[index] if self.trees else None
            for row in range(self.rows[index]):
                seen = torch.arange(len(slots)) <= cached + row
                if tree is not None:
                    seen = torch.cat([torch.ones(cached, dtype=torch.bool), tree[row]])
                query = self.query[self.starts[index] + row].double().view(self.kv_heads, -1, self.head_size)
                scores = (query @ keys.transpose(1, 2)).masked_fill(~seen, -torch.inf)
                out[self.starts[index] + row] = (scores.softmax(-1) @ values).view(self.heads, -1)
        return out


def rms(error: torch.Tensor) -> float:
    return error.double().square().mean().sqrt().item()


SHAPES = [  # heads, KV heads, head size, block size
    (4, 4, 128, 32),
    (8, 1, 256, 16),
    (6, 2, 80, 16),
    (2, 1, 33, 7),
    (3, 3, 16, 1),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("isa")
def test_error_is_at_most_twice_the_reference_s(kind: str) -> None:
    check_error(Scene([1, 3, 5, 9, 1], [300, 0, 509, 100, 1], kind, 9, 3, 64))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 over fp8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size"), SHAPES)
def test_error_in_other_shapes(kind: str, heads: int, kv_heads: int, head_size: int, block_size: int) -> None:
    check_error(Scene([3, 1], [300, 130], kind, heads, kv_heads, head_size, block_size))


def check_error(scene: Scene) -> None:
    exact, reference, got = (
        scene.exact(),
        reference_attention(scene.query, scene.keys, scene.values, scene.views),
        scene.run(),
    )
    assert got.dtype == scene.query.dtype
    assert rms(got - exact) <= 2 * rms(reference - exact)


@pytest.mark.usefixtures("isa")
@settings(max_examples=10)
@given(st.data())
def test_any_batch_is_near_float64(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    cache_lens = [data.draw(st.sampled_from(EDGES)) for _ in rows]
    groups, kv_heads = data.draw(st.sampled_from([(1, 1), (3, 2), (8, 1)]))
    scene = Scene(
        rows,
        cache_lens,
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        head_size=data.draw(st.sampled_from([8, 16, 24])),
        block_size=data.draw(st.sampled_from([1, 5, 16, 64])),
        seed=data.draw(st.integers(0, 1000)),
    )
    trees = [None if data.draw(st.booleans()) else random_tree(count, scene.seed) for count in rows]
    scene.trees = trees
    library().magicdec_set_num_threads(data.draw(st.integers(1, 3)))
    torch.testing.assert_close(scene.run().double(), scene.exact(), atol=2e-6, rtol=1e-5)


def random_tree(count: int, seed: int) -> torch.Tensor:
    """Row, seen: each row sees itself and what its parent, an earlier row, sees."""
    draws, seen = random.Random(seed), torch.eye(count, dtype=torch.bool)
    for row in range(1, count):
        if (parent := draws.randrange(-1, row)) >= 0:
            seen[row] |= seen[parent]
    return seen


@pytest.mark.parametrize("head_size", [32, 64, 128])  # few rows of 64 and of 128 have a kernel of their own
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "float16 over fp8", "bfloat16 over fp8"])
@pytest.mark.usefixtures("isa")
@settings(max_examples=4)
@given(st.data())
def test_a_row_s_bits_do_not_depend_on_what_shares_its_pass(kind: str, head_size: int, data: st.DataObject) -> None:
    count, cached = data.draw(st.integers(2, 60)), data.draw(st.sampled_from(EDGES))
    heads = 2 * data.draw(st.integers(1, 6))
    scene = Scene([count], [cached], kind, heads, head_size=head_size, seed=data.draw(st.integers(0, 1000)))
    whole = scene.run()
    assert not whole.isnan().any()
    first = 0
    while first < count:
        last = min(count, first + data.draw(st.sampled_from([1, 1, 2, 3, 5, 8, 33])))
        others = data.draw(st.lists(st.integers(1, 9), max_size=3))
        its_lens = [data.draw(st.sampled_from(EDGES)) for _ in others]
        beside = Scene(others, its_lens, kind, heads, head_size=head_size, seed=1) if others else None
        library().magicdec_set_num_threads(data.draw(st.integers(1, 3)))
        assert torch.equal(scene.run_rows(first, last, beside), whole[first:last])
        first = last


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.usefixtures("isa")
def test_a_long_chunk_has_the_bits_of_its_rows_alone(kind: str) -> None:
    scene = Scene([500], [800], kind)  # more rows than share a tile, so all splits are one thread's
    whole = scene.run()
    for row in (0, 31, 223, 224, 225, 499):
        assert torch.equal(scene.run_rows(row, row + 1), whole[row : row + 1])


@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.usefixtures("isa")
def test_few_rows_are_rounded_as_many_are(head_size: int) -> None:
    """Every value has its opposite, so that little but rounding is left of a sum: bits that bfloat16 else hides."""
    scene = Scene([40], [600], "bfloat16", head_size=head_size)
    slots = torch.tensor(scene.slots(0))
    one, other = slots[:600][torch.randperm(600, generator=torch.Generator().manual_seed(1))].view(2, 300)
    scene.keys[:, other], scene.values[:, other] = scene.keys[:, one], -scene.values[:, one]
    scene.values[:, slots[600:]] = 0
    whole = scene.run()
    assert 0 < whole.abs().max() < 0.01
    for row in range(40):
        assert torch.equal(scene.run_rows(row, row + 1), whole[row : row + 1])


@pytest.mark.parametrize("rows", [2, 12])
@pytest.mark.usefixtures("isa")
def test_a_chain_as_a_tree_and_another_block_table_give_the_same_bits(rows: int) -> None:
    scene = Scene([rows], [255], "bfloat16", head_size=64)
    chain = scene.run()
    scene.trees = [torch.ones(rows, rows, dtype=torch.bool).tril()]
    assert torch.equal(scene.run(), chain)
    moved = Scene([rows], [255], "bfloat16", head_size=64, block_size=4)
    moved.query, moved.trees = scene.query, None
    for cache, its in ((moved.keys, scene.keys), (moved.values, scene.values)):
        cache[:, moved.slots(0)] = its[:, scene.slots(0)]
    assert torch.equal(moved.run(), chain)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("heads", [3, 12])
@pytest.mark.usefixtures("isa")
def test_weights_are_powers_of_e(kind: str, heads: int) -> None:
    """Each result tells one weight but for its rounding, and roundings of hundreds of results cancel.

    A first entry of score 0 and value 1 and 255 entries of score x and value 0 give 1 / (1 + 255 e^x).
    """
    others, count = 255, 1500
    dtype = KINDS[kind][0]
    cache = torch.zeros(2, 1, 256, 64, dtype=dtype)
    cache[0, 0, 1:, :2] = torch.tensor([-1, -1 / 256])
    cache[1, 0, 0] = 1
    query = torch.zeros(count, heads, 64, dtype=dtype)
    query[..., :2] = torch.rand(count, heads, 2, generator=torch.Generator().manual_seed(0)) * 5 + 0.125
    sequences = PagedSequences(list(range(count + 1)), [others] * count, [list(range(16))] * count, 16)
    out = native_attention.paged_attention(library(), query, cache[0], cache[1], sequences)
    x = -(query[..., 0].double() + query[..., 1].double() / 256)
    weight = (1 / out[..., 0].double() - 1) / others
    errors, part = (weight.log() - x).flatten(), (x * math.log2(math.e)).frac().add(1).mul(8).long().flatten()
    for piece in range(8):
        assert abs(errors[part == piece].mean()) < (4e-4 if kind == "bfloat16" else 1e-6)


@pytest.mark.usefixtures("isa")
def test_a_nan_is_seen_by_the_rows_that_read_it() -> None:
    scene = Scene([4], [200], "float32")
    scene.keys[:, scene.slots(0)[202]] = torch.nan
    out = scene.run()
    assert not out[:2].isnan().any()
    assert out[2:].isnan().all()


def test_the_result_is_multiplied_with_the_values_scale() -> None:
    scene = Scene([3], [100], "float32")
    assert torch.equal(scene.run(0.5), scene.run() * 0.5)


def test_paged_attention_takes_the_kernel_where_it_knows_the_numbers() -> None:
    scene = Scene([3, 1], [100, 7], "bfloat16")
    assert torch.equal(paged_attention(scene.query, scene.keys, scene.values, scene.views), scene.run())
    query, keys, values = (tensor.double() for tensor in (scene.query, scene.keys, scene.values))
    reference = reference_attention(query, keys, values, scene.views)
    assert torch.equal(paged_attention(query, keys, values, scene.views), reference)


def test_what_does_not_fit_is_refused() -> None:
    scene = Scene([3], [100], "float32")
    sequences = scene.views.native
    with pytest.raises(ValueError, match="is outside a cache"):
        native_attention.paged_attention(library(), scene.query, scene.keys[:, :64], scene.values[:, :64], sequences)
    with pytest.raises(ValueError, match="short of 1"):
        PagedSequences([0, 3], [100], [scene.blocks[0][:-1]], 16)
    with pytest.raises(ValueError, match="5 heads over keys"):
        native_attention.paged_attention(
            library(), scene.query[:, :5], scene.keys.repeat(3, 1, 1), scene.values, sequences
        )
