"""Plugins' configuration."""

from .plugin import CustomAllReduceHelper, PluginConfig

__all__ = ["CustomAllReduceHelper", "PluginConfig"]
