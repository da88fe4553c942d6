"""Keys turned before they are rounded to FP8, and queries with them (QuaRot, Ashkboos et al., arXiv 2404.00456).

A few channels of a key can be far larger than the rest, and nearly constant. E4M3's error is relative, so they have
nearly all of it, and queries are large where they are. An orthogonal turn spreads it over all channels; scores do not
change, since queries are turned alike. It comes after RoPE and so cannot stand in the weights.
"""

import torch


class Hadamard:
    """The turn of heads of one size, in blocks of the largest power of two that divides it.

    to_keys, to_queries: [head_size, head_size], a Hadamard matrix times powers of two, so that every entry is exact in
    any dtype; to_keys @ to_queries.T is the identity.
    """

    def __init__(self, head_size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        block = head_size & -head_size
        matrix = torch.ones(1, 1, dtype=dtype)
        while len(matrix) < block:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        whole = torch.kron(torch.eye(head_size // block, dtype=dtype), matrix).to(device)
        exponent = block.bit_length() - 1
        self.to_keys: torch.Tensor = whole * 2.0 ** -(exponent // 2)
        self.to_queries: torch.Tensor = whole * 2.0 ** -(exponent - exponent // 2)

    def keys(self, keys: torch.Tensor) -> torch.Tensor:
        """[..., head_size], as they are stored."""
        return keys @ self.to_keys

    def queries(self, queries: torch.Tensor) -> torch.Tensor:
        """[..., head_size], to be multiplied with turned keys."""
        return queries @ self.to_queries

    def turn_back(self, keys: torch.Tensor) -> torch.Tensor:
        """Stored keys as they were."""
        return keys @ self.to_queries.T
