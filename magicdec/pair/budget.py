"""How many blocks a draft's bounded cache takes, whatever the context length."""

from magicdec.errors import ConfigError


def num_sink_blocks(num_sink_tokens: int, block_size: int) -> int:
    """Whole blocks that hold the sinks: paged attention knows no holes in a table."""
    return -(-num_sink_tokens // block_size)


def num_cyclic_blocks(num_sink_tokens: int, window_size: int, block_size: int, max_draft_len: int) -> int:
    """Blocks of one cyclic cache, whatever the context length: sinks, window, and two spare ones."""
    if max_draft_len > block_size:
        raise ConfigError(
            f"max_draft_len={max_draft_len} is more than block_size={block_size}: a rewind could reach a block that "
            f"is being overwritten; use a block_size of at least {max_draft_len} or shorter drafts"
        )
    return num_sink_blocks(num_sink_tokens, block_size) + -(-window_size // block_size) + 2
