"""magicdec itself, by the interface that its own benchmark uses. Modes: see `WAYS`."""

import json
import sys
import time
from pathlib import Path

from magicdec.threads import wait_politely

wait_politely()

import torch  # noqa: E402 - threads are told how to wait before PyTorch starts them

from magicdec.bench.drafters import make_proposer  # noqa: E402
from magicdec.bench.grid import PLAIN, Way  # noqa: E402
from magicdec.bench.run import BatchRunner  # noqa: E402
from magicdec.runtime.llm import LLM  # noqa: E402
from magicdec.runtime.sampling_params import SamplingParams  # noqa: E402

WAYS = {
    "plain": PLAIN,
    "self": Way("self", 512, 4),
    "self-int4": Way("self-int4", 512, 4),
    "ngram": Way("ngram", None, 4),
}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(request["threads"])
    prompts, wanted, way = request["prompts"], request["output_tokens"], WAYS[request["mode"]]
    room = wanted + 4 * 5
    llm = LLM(
        request["engine"],
        max_batch_size=len(prompts),
        max_num_tokens=1024,
        kv_cache_tokens=len(prompts) * (len(prompts[0]) + room + 64),
    )
    params = SamplingParams(
        temperature=0, max_tokens=room, ignore_eos=True, num_draft_tokens=way.draft_length, acceptance="rejection"
    )
    runner = BatchRunner(llm.engine, make_proposer(llm, way), time.perf_counter)
    single = params.model_copy(update={"max_tokens": 1, "num_draft_tokens": 0})
    prefill = runner.read(prompts, single, lambda _done, _total: None)
    run, outputs = runner.run(prompts, [params] * len(prompts), wanted)
    result = {
        "prefill_seconds": prefill,
        "decode_seconds": run.decode_seconds,
        "tokens": run.tokens,
        "steps": run.steps,
        "outputs": [ids[:wanted] for ids in outputs],
        "precision": str(llm.runner.dtype).removeprefix("torch."),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
