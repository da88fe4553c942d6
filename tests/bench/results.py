"""Results of benchmarks that were never run, for tests of what is made from them."""

from magicdec.bench.result import BatchRun, BenchResult, Cell, Drafter, Model, Prefill, Settings, Skipped
from magicdec.bench.stats import summarise


def batch_run(
    seconds: float = 2.0,
    *,
    steps: int = 10,
    tokens: int = 30,
    drafted: int = 40,
    accepted: int = 20,
    draft: float = 0.6,
    verify: float = 1.0,
) -> BatchRun:
    return BatchRun(
        reading_seconds=9.0,
        decode_seconds=seconds,
        steps=steps,
        tokens=tokens,
        drafted=drafted,
        accepted=accepted,
        draft_seconds=draft,
        verify_seconds=verify,
    )


def plain_run(seconds: float = 2.0) -> BatchRun:
    return batch_run(seconds, steps=20, tokens=20, drafted=0, accepted=0, draft=0.0, verify=seconds - 0.1)


def cell(
    context: int,
    drafter: Drafter = "none",
    *,
    batch: int = 1,
    window: int | None = None,
    length: int | None = 0,
    temperature: float = 0.0,
    beyond: bool = False,
) -> Cell:
    plain = (plain_run(2.0), plain_run(2.2))
    runs = plain if drafter == "none" else (batch_run(2.0), batch_run(2.4))
    beside = () if drafter == "none" else plain
    return Cell(
        context=context,
        prompt_tokens=context,
        batch=batch,
        temperature=temperature,
        drafter=drafter,
        window=window,
        draft_length=length,
        beyond_trained_len=beyond,
        target_kv_bytes=23_040 * context * batch,
        draft_kv_bytes=0,
        identical=None if temperature else True,
        runs=runs,
        plain_runs=beside,
        summary=summarise(runs, beside, batch),
        projected_speedup=1.5 if beyond and drafter == "self" else None,
        projected_from=8192 if beyond and drafter == "self" else None,
    )


def result() -> BenchResult:
    """Two batches, three contexts, the last past the trained length, two windows, and sampling too."""
    cells = [
        each
        for temperature in (0.0, 1.0)
        for context in (1024, 8192, 32768)
        for batch in (1, 4)
        for beyond in (context > 8192,)
        for each in (
            cell(context, batch=batch, temperature=temperature, beyond=beyond),
            *(
                cell(context, "self", batch=batch, window=w, length=n, temperature=temperature, beyond=beyond)
                for w in (256, 512)
                for n in (2, 4)
            ),
            cell(context, "self-full", batch=batch, length=4, temperature=temperature, beyond=beyond),
            cell(context, "ngram", batch=batch, length=4, temperature=temperature, beyond=beyond),
        )
    ]
    return BenchResult(
        created="2026-01-01T00:00:00+00:00",
        machine="a machine",
        versions={"magicdec": "0"},
        model=Model(
            engine="engine",
            pair="pair",
            dtype="bfloat16",
            kv_cache_dtype="bfloat16",
            weight_bytes=269_000_000,
            kv_bytes_per_token=23_040,
            trained_len=8192,
            block_size=16,
            num_sink_tokens=4,
        ),
        settings=Settings(text="a text", output_tokens=32, repeats=2, prefill_chunk=1024, frequency_penalty=0.3),
        minutes=1.5,
        prefill=(Prefill(context=1024, batch=4, seconds=4.0, filled=False, tokens_per_second=1024.0),),
        cells=tuple(cells),
        skipped=(Skipped(what="8 x 32,768 tokens, T=1", why="time limit"),),
    )
