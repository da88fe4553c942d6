"""A tiny language whose runner checks every cache entry it reads: the oracle of the engine, in tests and at zero cost.

The law of the next token depends on *all* tokens that the view shows, so a single wrong, stale or missing entry changes
the output; and entries carry their position and a link to their predecessor, so most faults fail on the spot.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magicdec.plugins.model.inputs import ModelInput


@dataclass(frozen=True)
class _Entry:
    """What one slot holds: the token, where it stands, and a hash of the predecessor's link and this token."""

    token_id: int
    position: int
    link: bytes
    previous: bytes


class ToyRunner:
    """A `ModelRunner` over a made-up language of `vocab_size` tokens.

    num_sink_tokens: entries after which a bounded view may have a gap; None allows no gap (a target that is never
    used for self-speculation). sinks_follow: the gap shows in the links only, positions are contiguous.
    detail: how much the law depends on the whole view rather than on the last two tokens; a draft with another detail
    agrees with its target to a degree.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 16,
        num_blocks: int = 64,
        block_size: int = 4,
        num_sink_tokens: int | None = None,
        sinks_follow: bool = False,
        detail: float = 1.0,
        sharpness: float = 1.5,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_sink_tokens = num_sink_tokens
        self.sinks_follow = sinks_follow
        self.detail = detail
        self.sharpness = sharpness
        self.slots: list[_Entry | None] = [None] * (num_blocks * block_size)
        self.num_rows = 0  # rows of all passes so far

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Logits [N, vocab_size] in float64; AssertionError on any entry that should not be seen."""
        starts = inputs.query_start_loc.tolist()
        wanted = set(inputs.logits_indices.tolist())
        rows = []
        for index, cache_len in enumerate(inputs.cache_lens.tolist()):
            table = inputs.block_table[index].tolist()
            view = [self._read(table, entry) for entry in range(cache_len)]
            for row in range(starts[index], starts[index + 1]):
                entry = self._entry(view, int(inputs.input_ids[row]), int(inputs.positions[row]))
                slot = int(inputs.slot_mapping[row])
                assert slot == self._slot(table, len(view)), f"row {row} is written outside its view"
                self.slots[slot] = entry
                view.append(entry)
                if row in wanted:
                    self._check(view)
                    rows.append(self.next_logits([seen.token_id for seen in view]))
            self.num_rows += starts[index + 1] - starts[index]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=torch.float64)

    def read_keys(self, slots: list[int], positions: list[int]) -> torch.Tensor:
        """The entries need no copy; their positions are checked."""
        assert [self._at(slot).position for slot in slots] == positions
        return torch.empty(0)

    def write_keys(self, slots: list[int], positions: list[int], keys: torch.Tensor) -> None:
        """Move the entries of these slots to other positions."""
        assert keys.numel() == 0
        for slot, position in zip(slots, positions, strict=True):
            entry = self._at(slot)
            self.slots[slot] = _Entry(entry.token_id, position, entry.link, entry.previous)

    def next_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The law of the token after these, [vocab_size] float64; a pure function, usable without any cache."""
        near, far = self._noise(token_ids[-2:]), self._noise(token_ids)
        return torch.from_numpy(self.sharpness * (near + self.detail * far))

    def _noise(self, token_ids: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        seed = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(self.vocab_size)

    def _entry(self, view: Sequence[_Entry], token_id: int, position: int) -> _Entry:
        previous = view[-1].link if view else b""
        link = hashlib.blake2b(previous + token_id.to_bytes(8, "little"), digest_size=8).digest()
        return _Entry(token_id, position, link, previous)

    def _read(self, table: Sequence[int], entry: int) -> _Entry:
        return self._at(self._slot(table, entry))

    def _at(self, slot: int) -> _Entry:
        entry = self.slots[slot]
        assert entry is not None, f"slot {slot} is read before it is written"
        return entry

    def _slot(self, table: Sequence[int], entry: int) -> int:
        return table[entry // self.block_size] * self.block_size + entry % self.block_size

    def _check(self, view: Sequence[_Entry]) -> None:
        """Neighbours in a view must be neighbours in the text, but for one gap behind the sinks."""
        for index in range(1, len(view)):
            before, after = view[index - 1], view[index]
            gap = index == self.num_sink_tokens
            linked = after.previous == before.link
            adjacent = after.position == before.position + 1
            assert linked or gap, f"entry {index} does not follow entry {index - 1}: it is stale"
            assert adjacent or (gap and not self.sinks_follow), f"entry {index} stands at position {after.position}"
            assert after.position > before.position
        if self.num_sink_tokens is None or not self.sinks_follow:
            assert view[0].position == 0, f"the first entry stands at position {view[0].position}"
