"""The tensors of one step against examples worked out by hand from TensorRT-LLM's own description of its inputs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magicdec.plugins.model.inputs import ModelInput, SequenceInput, pack
from magicdec.runtime.runners.trtllm.inputs import EngineLimits, StepTensors, constant_tensors, split, step_tensors

LIMITS = EngineLimits(
    num_layers=3,
    block_size=4,
    max_batch_size=8,
    max_num_tokens=64,
    max_num_logits=40,
    max_blocks_per_seq=8,
    max_seq_len=32,
)


def sequence(tokens: list[int], past: int, table: list[int], num_logits: int, shift: int = 0) -> SequenceInput:
    entries = range(past, past + len(tokens))
    return SequenceInput(
        token_ids=tokens,
        positions=[shift + entry for entry in entries],
        cache_len=past,
        block_table=table,
        slot_mapping=[table[entry // 4] * 4 + entry % 4 for entry in entries],
        num_logits=num_logits,
    )


# Two prompt chunks (a first one, and one with a past), two verifications, three generations, in mixed order.
MIXED = [
    sequence([70], 9, [20, 21, 22], 1),  # generation
    sequence([10, 11, 12, 13, 14], 0, [1, 2], 0),  # first chunk: five rows, no logits wanted
    sequence([30, 31, 32], 6, [5, 6, 7], 3),  # verification of two drafts
    sequence([71], 5, [23, 24], 1, shift=100),  # generation through a bounded view: positions are far ahead
    sequence([20, 21], 4, [3, 4], 1),  # last chunk of a prompt
    sequence([40, 41], 11, [8, 9, 10, 11], 2),  # verification of one draft
    sequence([72], 1, [25], 1),  # generation
]


@pytest.fixture(scope="module")
def step() -> StepTensors:
    return step_tensors(pack(MIXED), LIMITS)


def test_contexts_come_first_and_then_the_generations(step: StepTensors) -> None:
    t = step.tensors
    assert t["host_request_types"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert t["input_ids"].tolist() == [10, 11, 12, 13, 14, 30, 31, 32, 20, 21, 40, 41, 70, 71, 72]
    assert t["position_ids"].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 4, 5, 11, 12, 9, 105, 1]


def test_lengths(step: StepTensors) -> None:
    t = step.tensors
    assert t["context_lengths"].tolist() == [5, 3, 2, 2, 9, 5, 1]  # rows of this step; a generation's is its past
    assert t["host_context_lengths"].tolist() == t["context_lengths"].tolist()
    assert t["sequence_length"].tolist() == [5, 9, 6, 13, 10, 6, 2]  # with this step's rows
    assert t["host_past_key_value_lengths"].tolist() == [5, 9, 6, 13, 9, 5, 1]  # a generation's without its row


def test_last_token_ids_count_from_one_and_name_every_draft_position(step: StepTensors) -> None:
    # rows 1-5 first chunk (only its end), 6-8 verification, 9-10 last chunk, 11-12 verification, then one each
    assert step.tensors["last_token_ids"].tolist() == [5, 6, 7, 8, 10, 11, 12, 13, 14, 15]


def test_logits_come_back_in_the_callers_order(step: StepTensors) -> None:
    # wanted: generation | three | generation | one | two | generation
    assert step.logits_rows.tolist() == [7, 1, 2, 3, 8, 4, 5, 6, 9]
    assert step_tensors(pack([MIXED[2], MIXED[0]]), LIMITS).logits_rows.tolist() == [0, 1, 2, 3]


def test_block_offsets(step: StepTensors) -> None:
    offsets = step.tensors["kv_cache_block_offsets"]
    assert offsets.shape == (1, 7, 2, 4)  # the longest of them holds 13 entries
    assert offsets[0, 0].tolist() == [[6, 12, 0, 0], [7, 13, 1, 1]]  # block * 3 layers * 2, + 1 for values
    assert offsets[0, 3].tolist() == [[48, 54, 60, 66], [49, 55, 61, 67]]
    assert offsets[0, 6, :, 0].tolist() == [150, 151]
    assert torch.equal(step.tensors["host_kv_cache_block_offsets"], offsets)


def test_everything_is_int32(step: StepTensors) -> None:
    assert {tensor.dtype for tensor in step.tensors.values()} == {torch.int32}


def test_the_first_token_of_all_is_a_context() -> None:
    t = step_tensors(pack([sequence([7], 0, [1], 1)]), LIMITS).tensors
    assert t["host_request_types"].tolist() == [0]
    assert t["context_lengths"].tolist() == [1]
    assert t["host_past_key_value_lengths"].tolist() == [1]


def test_a_table_wider_than_the_sequence_is_cut_and_a_narrow_one_filled_up() -> None:
    wide = sequence([7], 2, [3, 9, 9, 9, 9], 1)
    assert step_tensors(pack([wide]), LIMITS).tensors["kv_cache_block_offsets"].tolist() == [[[[18], [19]]]]
    limits = replace(LIMITS, min_blocks_per_seq=3)
    assert step_tensors(pack([wide]), limits).tensors["kv_cache_block_offsets"].shape == (1, 1, 2, 3)
    narrow = sequence([7], 2, [3], 1)
    filled = step_tensors(pack([narrow]), limits).tensors["kv_cache_block_offsets"]
    assert filled.tolist() == [[[[18, 0, 0], [19, 1, 1]]]]


def test_a_row_that_would_be_written_elsewhere_is_refused() -> None:
    wrong = replace(sequence([7], 2, [3], 1), slot_mapping=[3 * 4 + 3])
    with pytest.raises(AssertionError, match="slot"):
        step_tensors(pack([wrong]), LIMITS)


def test_a_sequence_beyond_the_engine_is_refused() -> None:
    with pytest.raises(AssertionError, match="longer"):
        step_tensors(pack([sequence([7], 32, list(range(9)), 1)]), LIMITS)


def test_constant_tensors() -> None:
    t = constant_tensors(LIMITS, 4096)
    assert t["host_max_attention_window_sizes"].tolist() == [32, 32, 32]
    assert t["host_sink_token_length"].tolist() == [0]
    assert t["host_kv_cache_pool_pointers"].tolist() == [[4096, 0]]
    assert t["host_kv_cache_pool_pointers"].dtype == torch.int64
    assert t["host_kv_cache_pool_mapping"].tolist() == [[0, 0], [0, 1], [0, 2]]
    assert t["host_runtime_perf_knobs"].tolist() == [1] + [-1] * 15
    assert t["host_context_progress"].tolist() == [0]


def test_a_pass_within_the_limits_is_not_cut() -> None:
    inputs = pack(MIXED)
    assert split(inputs, LIMITS) == [inputs]


def test_a_long_prompt_is_cut_into_chunks() -> None:
    inputs = pack([sequence([1], 3, [9], 1), sequence(list(range(10)), 5, [1, 2, 3, 4], 2)])
    first, second, third = split(inputs, replace(LIMITS, max_num_tokens=5))
    assert first.cache_lens.tolist() == [3, 5]
    assert first.query_start_loc.tolist() == [0, 1, 5]
    assert first.logits_indices.tolist() == [0]
    assert (second.cache_lens.tolist(), second.logits_indices.tolist()) == ([9], [4])
    assert (third.cache_lens.tolist(), third.logits_indices.tolist()) == ([14], [0])
    assert [len(part.input_ids) for part in (first, second, third)] == [5, 5, 1]


SEQUENCES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 15), st.integers(0, 9)).map(lambda t: (t[0], t[1], min(t[2], t[0]))),
    min_size=1,
    max_size=6,
)


def build(shapes: list[tuple[int, int, int]]) -> ModelInput:
    """Every row has a token id of its own."""
    sequences, token = [], 100
    for index, (rows, past, num_logits) in enumerate(shapes):
        table = list(range(index * 8, index * 8 + 8))
        sequences.append(sequence(list(range(token, token + rows)), past, table, num_logits))
        token += rows
    return pack(sequences)


@given(SEQUENCES, st.integers(1, 12), st.integers(1, 4))
def test_any_pass_and_its_pieces_say_the_same(
    shapes: list[tuple[int, int, int]], max_num_tokens: int, max_batch_size: int
) -> None:
    """Each wanted row gets the logits of its own token, and every row is computed once, behind what it must see."""
    inputs = build(shapes)
    limits = replace(LIMITS, max_num_tokens=max_num_tokens, max_batch_size=max_batch_size, max_num_logits=12)
    seen: dict[int, tuple[int, int]] = {}  # token -> (its key's offset, position)
    answered: list[int] = []
    for part in split(inputs, limits):
        assert len(part.input_ids) <= max_num_tokens
        assert len(part.cache_lens) <= max_batch_size
        step = step_tensors(part, limits)
        t = {name: tensor.tolist() for name, tensor in step.tensors.items()}
        types, row = t["host_request_types"], 0
        assert types == sorted(types)
        for index, kind in enumerate(types):
            total = t["sequence_length"][index]
            count = t["context_lengths"][index] if kind == 0 else 1
            for entry in range(total - count, total):
                offset = t["kv_cache_block_offsets"][0][index][0][entry // 4]
                assert t["input_ids"][row] not in seen
                seen[t["input_ids"][row]] = (offset * 4 + entry % 4, t["position_ids"][row])
                row += 1
        logits = [t["input_ids"][end - 1] for end in t["last_token_ids"]]
        answered += [logits[at] for at in step.logits_rows.tolist()]
    assert answered == inputs.input_ids[inputs.logits_indices].tolist()
    slots = [(slot // 4 * 6 * 4 + slot % 4) for slot in inputs.slot_mapping.tolist()]
    expected = zip(slots, inputs.positions.tolist(), strict=True)
    assert seen == dict(zip(inputs.input_ids.tolist(), expected, strict=True))
