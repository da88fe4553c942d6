"""Compiling a checkpoint to TensorRT engines, one a rank, each in a process with its own GPU."""

import contextlib
import json
import logging
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from magicdec.builder.trtllm.plan import EnginePlan
from magicdec.builder.trtllm.rules import FP8_SM
from magicdec.errors import BuildError, MagicDecError

TRTLLM_VERSION: Final = "1.2.1"
BUILD_CONFIG_FILE: Final = "build_config.json"
logger = logging.getLogger("magicdec.builder")

# A change of one of these by TensorRT-LLM would make answers wrong or sizes not fit, so it fails the build; a change of
# another option costs speed at most, and is a warning.
_VITAL: Final = {
    "max_batch_size",
    "max_seq_len",
    "max_num_tokens",
    "max_draft_len",
    "max_beam_width",
    "kv_cache_type",
    "gather_context_logits",
    "speculative_decoding_mode",
    "context_fmha",
    "paged_kv_cache",
    "remove_input_padding",
    "tokens_per_block",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "multiple_profiles",
    "streamingllm",
}


def require_trtllm() -> None:
    """BuildError where TensorRT-LLM is not installed: before anything heavy."""
    if find_spec("tensorrt_llm") is None:
        raise BuildError(
            "--backend trtllm compiles with TensorRT-LLM, which is not installed here; on a machine with an NVIDIA GPU "
            f"install tensorrt-llm=={TRTLLM_VERSION} (pip install 'magicdec[trtllm]'), or build with --backend torch. "
            "--dry-run shows the build's options without it."
        )


def compile_engines(
    directory: Path,
    plan: EnginePlan,
    *,
    timing_cache: Path | None = None,
    workers: int | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[str]:
    """Compile the checkpoint in `directory`, and put rank{r}.engine and build_config.json beside it; returns the names.

    timing_cache: file that TensorRT's measurements are read from and written to. workers: processes at a time, each
    with a GPU of its own; None: as many as there are ranks and GPUs; 0: no process, all ranks here, one after another.
    on_progress("compile target" or "compile draft", ranks done, ranks).
    BuildError names the rank and what TensorRT-LLM said.
    """
    require_trtllm()
    report = on_progress or (lambda _stage, _done, _total: None)
    stage, ranks = f"compile {plan.role}", range(plan.tp_size)
    report(stage, 0, len(ranks))
    finished = _in_processes if workers != 0 else _in_this_process
    for done, _ in enumerate(finished(directory, plan, timing_cache, workers or _num_workers(plan)), start=1):
        report(stage, done, len(ranks))
    return [*(f"rank{rank}.engine" for rank in ranks), BUILD_CONFIG_FILE]


def _in_this_process(directory: Path, plan: EnginePlan, timing_cache: Path | None, _workers: int) -> Iterator[int]:
    for rank in range(plan.tp_size):
        compile_rank(directory, plan, rank, timing_cache)
        yield rank


def _in_processes(directory: Path, plan: EnginePlan, timing_cache: Path | None, workers: int) -> Iterator[int]:
    """Fresh processes, so that each rank starts with an empty GPU and leaves one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = {pool.submit(compile_rank, directory, plan, rank, timing_cache): rank for rank in range(plan.tp_size)}
        try:
            for job in as_completed(jobs):
                job.result()
                yield jobs[job]
        except BrokenProcessPool as error:
            raise BuildError(
                f"a process that compiled the {plan.role} died ({error}), most likely for want of memory; close what "
                "else uses this machine's memory and GPUs and build again"
            ) from error
        finally:
            for job in jobs:
                job.cancel()


def _num_workers(plan: EnginePlan) -> int:
    import torch

    return max(1, min(plan.tp_size, torch.cuda.device_count()))


def compile_rank(directory: Path, plan: EnginePlan, rank: int, timing_cache: Path | None) -> None:
    """Compile one rank in this process. The engine appears under its name only when it is whole."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        engine = _build(directory, plan, rank, timing_cache)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".engine-") as temporary:
            engine.save(temporary)  # writes a config.json, which must not replace the checkpoint's
            Path(temporary, f"rank{rank}.engine").rename(directory / f"rank{rank}.engine")
            if rank == 0:
                Path(temporary, "config.json").rename(directory / BUILD_CONFIG_FILE)
    except MagicDecError:
        raise
    except Exception as error:  # what a foreign builder raises is not ours to foresee
        raise BuildError(
            f"TensorRT-LLM could not build rank {rank} of the {plan.role}: {type(error).__name__}: {error}; its log "
            "above may say more"
        ) from error


def _build(directory: Path, plan: EnginePlan, rank: int, timing_cache: Path | None) -> Any:
    from tensorrt_llm._utils import get_sm_version
    from tensorrt_llm.builder import BuildConfig, build
    from tensorrt_llm.models.modeling_utils import PretrainedConfig, SpeculativeDecodingMode
    from tensorrt_llm.plugin import PluginConfig

    from magicdec.plugins.trtllm_models import ExplicitForCausalLM

    _check_machine(plan, get_sm_version())
    # learned_absolute: positions are the network's business, TensorRT-LLM makes no tables of its own for them.
    values = {**plan.checkpoint, "position_embedding_type": "learned_absolute", "num_positions": plan.num_positions}
    model = ExplicitForCausalLM.from_checkpoint(str(directory), rank=rank, config=PretrainedConfig(**values))
    options = {
        **plan.build,
        "speculative_decoding_mode": SpeculativeDecodingMode[plan.build["speculative_decoding_mode"]],
        "input_timing_cache": str(timing_cache) if timing_cache is not None and timing_cache.exists() else None,
        "output_timing_cache": str(timing_cache) if timing_cache is not None else None,
    }
    engine = build(model, BuildConfig(**options, plugin_config=PluginConfig(**plan.plugin)))
    _check_result(plan, engine.config.build_config)
    return engine


def _check_machine(plan: EnginePlan, sm: int) -> None:
    """The GPU that builds is the one that runs: engines are made for its kind."""
    if plan.sm is not None and plan.sm != sm:
        raise BuildError(
            f"the configuration's gpu has compute capability {plan.sm / 10:.1f}, the GPU here {sm / 10:.1f}; engines "
            "run only on the kind of GPU that they were compiled on: change gpu, or build there"
        )
    quantization = plan.checkpoint["quantization"]
    if sm < FP8_SM and "FP8" in (quantization["quant_algo"], quantization["kv_cache_quant_algo"]):
        raise BuildError(f"FP8 needs a GPU of compute capability 8.9 or newer, the GPU here has {sm / 10:.1f}")


def _check_result(plan: EnginePlan, built: Any) -> None:
    """What the build ended with must be what was planned."""
    ended = {name: _plain(getattr(built, name)) for name in plan.resolved_build}
    plugins = {name: _plain(getattr(built.plugin_config, name)) for name in plan.resolved_plugin}
    changed = _changes(plan.resolved_build, ended) | _changes(plan.resolved_plugin, plugins)
    vital = {name: text for name, text in changed.items() if name in _VITAL}
    if vital:
        raise BuildError(
            f"TensorRT-LLM changed options of the {plan.role} that it must not change: {', '.join(vital.values())}"
        )
    for text in changed.values():
        logger.warning("TensorRT-LLM changed an option of the %s: %s", plan.role, text)


def _changes(planned: Mapping[str, Any], ended: Mapping[str, Any]) -> dict[str, str]:
    return {n: f"{n} {planned[n]!r} to {ended[n]!r}" for n in planned if planned[n] != ended[n]}


def _plain(value: Any) -> Any:
    """Enumerations by their names, everything else as it is."""
    with contextlib.suppress(TypeError):
        json.dumps(value)
        if not hasattr(value, "name"):
            return value
    return getattr(value, "name", str(value))
