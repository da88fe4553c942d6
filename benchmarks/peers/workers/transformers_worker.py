"""Hugging Face transformers, `generate` with its own defaults. Modes: plain, lookup (prompt lookup, batch 1 only)."""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

LOOKUP_TOKENS = 4


class Stamps(StoppingCriteria):
    """Notes when how many tokens were there; called after every forward pass. Never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, *_scores: object, **_options: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(request["threads"])
    model = AutoModelForCausalLM.from_pretrained(request["huggingface"], dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor(request["prompts"])
    lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if request["mode"] == "lookup" else {}
    stamps = Stamps()
    begin = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["output_tokens"] + 1,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[stamps],
            **lookup,
        )
    first, last = stamps.lengths[0], stamps.lengths[-1]
    result = {
        "prefill_seconds": stamps.times[0] - begin,
        "decode_seconds": stamps.times[-1] - stamps.times[0],
        "tokens": (last - first) * len(ids),
        "steps": len(stamps.times) - 1,
        "outputs": output[:, ids.shape[1] :][:, : request["output_tokens"]].tolist(),
        "precision": "bfloat16",
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
