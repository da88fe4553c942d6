"""OpenVINO GenAI with continuous batching. Modes: plain, lookup (prompt lookup)."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

LOOKUP_TOKENS, NGRAM = 4, 3


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    prompts, wanted, lookup = request["prompts"], request["output_tokens"], request["mode"] == "lookup"
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 8
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 1024
    options: dict[str, object] = {"INFERENCE_NUM_THREADS": request["threads"]}
    if lookup:
        options["prompt_lookup"] = True
    pipe = genai.ContinuousBatchingPipeline(request["openvino"], scheduler, "CPU", options)
    config = genai.GenerationConfig()
    config.max_new_tokens = wanted + 1
    config.ignore_eos = True
    config.do_sample = False
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, NGRAM
    begin = time.perf_counter()
    handles = [
        pipe.add_request(index, ov.Tensor(np.array([ids], dtype=np.int64)), config) for index, ids in enumerate(prompts)
    ]
    outputs: list[list[int]] = [[] for _ in handles]
    first, last, before, steps = 0.0, 0.0, 0, 0
    while pipe.has_non_finished_requests():
        pipe.step()
        now = time.perf_counter()
        for handle, tokens in zip(handles, outputs, strict=True):
            if handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
        if not first and all(outputs):
            first, before = now, sum(map(len, outputs))
        elif first:
            steps += 1
        last = now
    result = {
        "prefill_seconds": first - begin,
        "decode_seconds": last - first,
        "tokens": sum(map(len, outputs)) - before,
        "steps": steps,
        "outputs": [tokens[:wanted] for tokens in outputs],
        "precision": request["openvino_precision"],
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
