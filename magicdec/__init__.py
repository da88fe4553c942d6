"""MagicDec: speculative decoding for long contexts with a bounded draft cache and exact acceptance."""

__version__ = "0.1.0"
