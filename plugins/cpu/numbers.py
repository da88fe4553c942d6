"""Number formats as csrc/numbers.h counts them."""

from typing import Final

import torch

from magicdec.plugins.fp8 import FP8

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of computation and weights
CACHE_DTYPES: Final = DTYPES | {FP8: 3}
