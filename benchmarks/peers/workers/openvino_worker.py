"""OpenVINO GenAI with continuous batching. Modes: plain, lookup (prompt lookup).

It decodes the first sequences while it still reads the prompts of others, so requests are given more tokens than are
wanted: what is measured begins when the last sequence has its first token and ends with the wanted number behind that
for the fastest one, while the whole batch is still writing.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

LOOKUP_TOKENS, NGRAM = 4, 3
CHUNK = 1024  # prompt tokens of a step


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    prompts, wanted, lookup = request["prompts"], request["output_tokens"], request["mode"] == "lookup"
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 8
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = CHUNK
    options: dict[str, object] = {"INFERENCE_NUM_THREADS": request["threads"]}
    if lookup:
        options["prompt_lookup"] = True
    pipe = genai.ContinuousBatchingPipeline(request["openvino"], scheduler, "CPU", options)
    config = genai.GenerationConfig()
    reading_steps = sum(-(-len(prompt) // CHUNK) + 1 for prompt in prompts)
    config.max_new_tokens = (1 + LOOKUP_TOKENS * lookup) * (wanted + 1 + reading_steps)
    config.ignore_eos = True
    config.do_sample = False
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, NGRAM
    begin = time.perf_counter()
    handles = [
        pipe.add_request(index, ov.Tensor(np.array([ids], dtype=np.int64)), config) for index, ids in enumerate(prompts)
    ]
    outputs: list[list[int]] = [[] for _ in handles]
    before: list[int] = []  # tokens of each sequence when the last one had its first
    first, now, steps = 0.0, 0.0, 0
    while not before or max(len(tokens) - n for tokens, n in zip(outputs, before, strict=True)) < wanted:
        pipe.step()
        now = time.perf_counter()
        for handle, tokens in zip(handles, outputs, strict=True):
            if handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
        if before:
            steps += 1
        elif all(outputs):
            first, before = now, [len(tokens) for tokens in outputs]
    result = {
        "prefill_seconds": first - begin,
        "decode_seconds": now - first,
        "tokens": sum(map(len, outputs)) - sum(before),
        "steps": steps,
        "outputs": [tokens[:wanted] for tokens in outputs],
        "precision": request["openvino_precision"],
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
