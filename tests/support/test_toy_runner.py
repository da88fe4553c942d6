"""The oracle's own tests: each fault that ToyRunner is there to find is found."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from magicdec.plugins.model.inputs import SequenceInput, pack
from tests.support.toy_runner import ToyRunner

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def _rows(start: int, stop: int, table: Sequence[int] = (2, 0, 1), num_logits: int = 1) -> SequenceInput:
    """Tokens start..stop-1 of TEXT, in blocks of 4."""
    return SequenceInput(
        token_ids=TEXT[start:stop],
        positions=range(start, stop),
        cache_len=start,
        block_table=table,
        slot_mapping=[table[i // 4] * 4 + i % 4 for i in range(start, stop)],
        num_logits=num_logits,
    )


def test_logits_depend_on_the_view_and_not_on_how_it_was_computed() -> None:
    """Chunks, one pass, several rows of logits: the pure function of the tokens before each."""
    runner = ToyRunner()
    runner.forward(pack([_rows(0, 3, num_logits=0)]))
    logits = runner.forward(pack([_rows(3, 10, num_logits=3)]))
    assert torch.equal(logits, torch.stack([runner.next_logits(TEXT[:n]) for n in (8, 9, 10)]))
    whole = ToyRunner().forward(pack([_rows(0, 10)]))
    assert torch.equal(whole, logits[-1:])
    assert runner.num_rows == 10


def test_every_token_of_the_view_matters() -> None:
    """Each one changes the law; with less detail less so, and the order of tokens counts."""
    runner = ToyRunner()
    law = runner.next_logits(TEXT)
    for index in range(len(TEXT)):
        changed = [*TEXT[:index], (TEXT[index] + 1) % 16, *TEXT[index + 1 :]]
        assert (runner.next_logits(changed) - law).abs().max() > 0.5
    assert not torch.equal(runner.next_logits(TEXT[::-1]), law)
    vague = ToyRunner(detail=0)
    assert torch.equal(vague.next_logits(TEXT), vague.next_logits(TEXT[-2:]))


def test_sequences_of_one_pass_do_not_mix() -> None:
    """Rows and logits come in order, each with its own view."""
    runner = ToyRunner()
    runner.forward(pack([_rows(0, 5, (0, 1)), _rows(0, 7, (2, 3))]))
    logits = runner.forward(
        pack(
            [
                _rows(5, 6, (0, 1)),
                _rows(7, 8, (2, 3), num_logits=0),
            ]
        )
    )
    assert torch.equal(logits, runner.next_logits(TEXT[:6])[None])


def _fails(runner: ToyRunner, row: SequenceInput, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        runner.forward(pack([row]))


def test_an_entry_that_was_never_written_is_not_read() -> None:
    """One row too few was computed before."""
    runner = ToyRunner()
    runner.forward(pack([_rows(0, 4)]))
    _fails(runner, _rows(5, 6), "read before it is written")


def test_a_stale_entry_is_seen() -> None:
    """Left over from a rejected draft: the token behind it follows another one."""
    runner = ToyRunner()
    runner.forward(pack([_rows(0, 6)]))
    rejected = replace(_rows(5, 6), token_ids=[11])
    runner.forward(pack([_rows(5, 7)]))
    runner.forward(pack([rejected]))  # overwrites token 5 under token 6
    _fails(runner, _rows(7, 8), "it is stale")


def test_a_wrong_position_is_seen() -> None:
    """Positions of a view without a gap go up by one."""
    runner = ToyRunner()
    runner.forward(pack([_rows(0, 4)]))
    _fails(runner, replace(_rows(4, 5), positions=[5]), "stands at position 5")
    _fails(ToyRunner(), replace(_rows(0, 4), positions=range(1, 5)), "first entry stands at position 1")


def test_a_write_outside_the_view_is_seen() -> None:
    """The slot must be where the table says that the row stands."""
    _fails(ToyRunner(), replace(_rows(0, 2), slot_mapping=[8, 10]), "outside its view")


def test_a_table_that_skips_a_block_is_seen() -> None:
    """Unless a gap is allowed there: behind the sinks."""
    for sinks, allowed in ((None, False), (4, True), (8, False)):
        runner = ToyRunner(num_sink_tokens=sinks)
        runner.forward(pack([_rows(0, 9)]))
        row = SequenceInput(TEXT[9:], [9], 5, (2, 1), [1 * 4 + 1], 1)  # tokens 0-3 and 8
        if allowed:
            assert torch.equal(runner.forward(pack([row]))[0], runner.next_logits([*TEXT[:4], *TEXT[8:]]))
        else:
            _fails(runner, row, "stale|stands at position|does not follow")


def test_sinks_that_follow_must_be_moved() -> None:
    """With in-cache positions the gap shows in the links alone."""
    row = SequenceInput(TEXT[9:], [9], 5, (2, 1), [1 * 4 + 1], 1)
    runner = ToyRunner(num_sink_tokens=4, sinks_follow=True)
    runner.forward(pack([_rows(0, 9)]))
    _fails(runner, row, "stands at position 8")
    keys = runner.read_keys([8, 9, 10, 11], [0, 1, 2, 3])
    runner.write_keys([8, 9, 10, 11], [4, 5, 6, 7], keys)
    assert torch.equal(runner.forward(pack([row]))[0], runner.next_logits([*TEXT[:4], *TEXT[8:]]))
    with pytest.raises(AssertionError):
        runner.read_keys([8, 9, 10, 11], [0, 1, 2, 3])
