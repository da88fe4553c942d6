"""Run under mpiexec by test_trtllm.py: generates on TensorRT-LLM engines of several ranks, on the stand-in.

Every rank runs this; LLM(...) returns on rank 0 alone. Arguments: the pair, a file for the token ids, options.
"""

import json
import sys
from pathlib import Path

import torch

from magicdec.runtime.llm import LLM
from tests.e2e.test_exactness import PARAMS, PROMPTS
from tests.support.trtllm import standin


def main(pair: str, output: str, options: str) -> None:
    torch.set_num_threads(1)
    with standin():
        llm = LLM(pair, device="cpu", **json.loads(options))
        outputs = llm.generate(PROMPTS, PARAMS)
    found = {
        "tokens": [out.outputs[0].token_ids for out in outputs],
        "accepted": sum(out.metrics.num_accepted_tokens for out in outputs),
        "ranks": getattr(llm.runner, "tp_size", 1),
    }
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
