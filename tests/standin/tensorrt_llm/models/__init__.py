"""Models."""

from .modeling_utils import PretrainedConfig, PretrainedModel

__all__ = ["PretrainedConfig", "PretrainedModel"]
