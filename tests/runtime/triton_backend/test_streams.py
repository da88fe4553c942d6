"""Many streams at a time: each is what the offline engine gives, and those that are left early hold nothing."""

import asyncio
import random
import time

from magicdec.runtime.llm import LLM
from tests.runtime.triton_backend.cases import Case, case, expected_text, expected_tokens
from tests.runtime.triton_backend.client import Response, collect, left_stream, text, token_ids
from tests.runtime.triton_backend.server import TritonServer

NUM_STREAMS = 32
LONG = 800  # tokens, far more than are made until a client leaves
LABELS = 'model="tensorrt_llm"'


def inputs(llm: LLM, model: str, each: Case) -> dict[str, object]:
    """A case as inputs of a model; token-level without words."""
    if model != "tensorrt_llm":
        return each.text_inputs()
    ids = llm.tokenizer.encode(each.prompt)
    renamed = {"top_k": "runtime_top_k", "top_p": "runtime_top_p"}
    options = {renamed.get(name, name): value for name, value in each.options.items()}
    return {
        "input_ids": ids,
        "input_lengths": len(ids),
        "request_output_len": each.max_tokens,
        "seed": each.seed,
        "streaming": True,
        **options,
    }


def model_of(index: int) -> str:
    """Words come as text, so those cases go to the models that take text."""
    words = {"stop_words", "bad_words"} & set(case(index).options)
    return ("ensemble", "tensorrt_llm_bls", "ensemble" if words else "tensorrt_llm")[index % 3]


def check(llm: LLM, model: str, each: Case, responses: list[Response]) -> None:
    wanted = each.expected(llm)
    if model == "tensorrt_llm":
        assert token_ids(responses) == expected_tokens(wanted)
        assert text(responses, "output_text") == wanted.text
    else:
        assert text(responses) == expected_text(wanted)


def test_32_streams_give_what_the_offline_engine_gives(server: TritonServer, offline: LLM) -> None:
    cases = [case(index) for index in range(NUM_STREAMS)]
    models = [model_of(index) for index in range(NUM_STREAMS)]

    async def run() -> list[list[Response]]:
        calls = [collect(server, m, inputs(offline, m, each)) for m, each in zip(models, cases, strict=True)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(run())
    for model, each, responses in zip(models, cases, answers, strict=True):
        check(offline, model, each, responses)
    assert any(len(responses) > 5 for responses in answers), "they must come in pieces for this test to mean anything"


def test_streams_that_are_left_early_free_their_blocks(server: TritonServer, offline: LLM) -> None:
    rng = random.Random(7)
    leaves = {index: rng.randrange(1, 6) for index in range(0, NUM_STREAMS, 2)}
    before = output_tokens(server)

    async def run(index: int) -> list[Response]:
        model, each = model_of(index), case(index)
        if index not in leaves:
            return await collect(server, model, inputs(offline, model, each))
        model = "tensorrt_llm_bls" if index % 4 else "tensorrt_llm"
        endless = Case(each.prompt, LONG, each.seed, {"top_p": 1.0, "end_id": -1})
        await left_stream(server, model, inputs(offline, model, endless), leaves[index])
        return []

    async def run_all() -> list[list[Response]]:
        return await asyncio.gather(*(run(index) for index in range(NUM_STREAMS)))

    answers = asyncio.run(run_all())
    for index, responses in enumerate(answers):
        if index not in leaves:
            check(offline, model_of(index), case(index), responses)
    wait_until_idle(server)
    made = output_tokens(server) - before
    assert made < len(leaves) * LONG / 4, f"{made} tokens were made: requests went on after their clients had left"


def output_tokens(server: TritonServer) -> float:
    """Of all requests that have ended."""
    return sum(value for name, value in server.metrics().items() if name.startswith("nv_llm_output_token_len_sum"))


def num_active(server: TritonServer) -> float:
    """Requests that the engine has."""
    return server.metrics()[f'nv_trt_llm_request_metrics{{{LABELS},request_type="active",version="1"}}']


def wait_until_idle(server: TritonServer, seconds: float = 10) -> None:
    """Until no request is open and every block is free, by metrics that are newer than this call."""
    start = time.time()
    while True:
        metrics = server.metrics()
        active = metrics[f'nv_trt_llm_request_metrics{{{LABELS},request_type="active",version="1"}}']
        published = metrics[f'nv_trt_llm_general_metrics{{general_type="timestamp",{LABELS},version="1"}}']
        free, most = (
            metrics[f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{kind}",{LABELS},version="1"}}']
            for kind in ("free", "max")
        )
        if published > start and active == 0 and free == most:
            return
        assert time.time() < start + seconds, f"{active} requests are open, {free} of {most} blocks are free"
        time.sleep(0.05)
