"""Kinds of quantisation."""

from .api import SYMBOLS

ALGORITHMS: list[str] = SYMBOLS["tensorrt_llm.quantization.mode.QuantAlgo"]["members"]


class QuantAlgo:
    """Names, as strings."""

    FP8 = "FP8"
    INT8 = "INT8"
    NVFP4 = "NVFP4"
    W4A8_AWQ = "W4A8_AWQ"


class QuantMode:
    """What is quantised. Real ones are flags; only FP8 and INT8 are known here."""

    def __init__(self, value: int = 0, *, fp8: bool = False, kv: str | None = None) -> None:
        assert value == 0
        self.fp8, self.kv = fp8, kv

    def has_fp8_qdq(self) -> bool:
        return self.fp8

    def has_fp8_kv_cache(self) -> bool:
        return self.kv == "FP8"

    def has_int8_kv_cache(self) -> bool:
        return self.kv == "INT8"

    def has_kv_cache_quant(self) -> bool:
        return self.kv is not None
