"""Number formats by the names that configurations give them."""

from typing import Final

import torch

TORCH_DTYPES: Final = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
