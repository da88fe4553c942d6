"""llama.cpp's server, in process by xllamacpp. Modes: plain, lookup (its n-gram speculation)."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xllamacpp

SPARE = 64
LOOKUP = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    prompts, wanted = request["prompts"], request["output_tokens"]
    params = xllamacpp.CommonParams()
    params.model.path = request["gguf"]
    params.n_parallel = len(prompts)
    params.n_ctx = len(prompts) * (len(prompts[0]) + wanted + SPARE)
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    if request["mode"] == "lookup":
        params.speculative.types = [LOOKUP]
    server = xllamacpp.Server(params)

    def complete(index: int, tokens: int) -> dict[str, object]:
        answer = server.handle_completions(
            {
                "prompt": prompts[index],
                "n_predict": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": True,
                "id_slot": index,
            }
        )
        if "timings" not in answer:
            raise SystemExit(f"llama.cpp refused the request: {json.dumps(answer)[:500]}")
        return answer["timings"]

    def complete_all(tokens: int) -> list[dict[str, object]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda index: complete(index, tokens), range(len(prompts))))

    begin = time.perf_counter()
    complete_all(1)  # every slot then keeps its prompt, so that all decode at the same time
    prefill = time.perf_counter() - begin
    timings = complete_all(wanted + 1)
    result = {
        "prefill_seconds": prefill,
        "decode_seconds": max(each["predicted_ms"] for each in timings) / 1e3,
        "tokens": sum(each["predicted_n"] - 1 for each in timings),
        "steps": None,
        "outputs": None,
        "precision": "bfloat16 weights, float16 KV",
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
