"""The stand-ins hold the real interface and rules, and whatever breaks them fails: they are worth what this proves."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from magicdec.builder.build import build_pair
from magicdec.plugins.model.inputs import SequenceInput
from tests.builder.engines import tiny_config
from tests.standin import ROOT
from tests.support.tiny_models import write_tiny_checkpoint
from tests.support.trtllm_driver import Driver

API: dict[str, Any] = json.loads((ROOT / "api.json").read_text())
Tensors = dict[str, torch.Tensor]


def sequence(table: tuple[int, ...], first: int, num_tokens: int, num_logits: int = 1) -> SequenceInput:
    entries = range(first, first + num_tokens)
    slots = [table[entry // 16] * 16 + entry % 16 for entry in entries]
    return SequenceInput([5 + entry % 90 for entry in entries], list(entries), first, table, slots, num_logits)


PROMPTS = [sequence((3, 1), 0, 20), sequence((0, 2), 0, 9)]
MIXED = [sequence((3, 1), 20, 4, 4), sequence((0, 2), 9, 1)]  # a verification and a generation step


@pytest.fixture
def target(tmp_path: Path, standin: Any) -> Path:
    """A compiled target, batch 4, 128 tokens a step."""
    assert standin
    config = tiny_config(backend="trtllm", max_batch_size=4, max_num_tokens=128, max_seq_len=64)
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", "qwen3")
    return build_pair(checkpoint, "self", config, tmp_path / "pair", workers=0) / "target"


@pytest.fixture
def driver(standin: Any, target: Path) -> Driver:
    """Both prompts are in the cache."""
    made = Driver(standin, target, 4)
    made.run(PROMPTS)
    return made


def test_engine_tensors_are_those_of_the_interface(driver: Driver) -> None:
    engine = driver.engine
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    assert names - {"logits"} <= set(API["engine_inputs"])
    for name in names - {"logits"}:
        dtype, shape, _ = API["engine_inputs"][name]
        assert engine.get_tensor_dtype(name).name == dtype.upper()
        assert len(engine.get_tensor_shape(name)) == len(shape)
    assert "logits" in API["engine_outputs"]
    assert engine.get_tensor_profile_shape("last_token_ids", 0)[2] == (4 * 9,)  # max_batch * (max_draft_len + 1)
    assert engine.get_tensor_profile_shape("kv_cache_block_offsets", 0)[2] == (1, 4, 2, 5)  # ceil((64 + 8) / 16)
    assert engine.get_tensor_profile_shape("cache_indirection", 0)[2] == (4, 1, 72)
    assert [engine.get_tensor_profile_shape("input_ids", index)[2] for index in (0, 1)] == [(64,), (128,)]


@pytest.mark.usefixtures("standin")
def test_names_and_defaults_are_those_of_the_interface() -> None:
    from tensorrt_llm.builder import BuildConfig
    from tensorrt_llm.models.modeling_utils import PretrainedModel, SpeculativeDecodingMode
    from tensorrt_llm.plugin import PluginConfig

    symbols = API["symbols"]
    build, plugins = BuildConfig().to_dict(), PluginConfig().to_dict()
    assert list(build) == list(symbols["tensorrt_llm.builder.BuildConfig"])
    assert list(plugins) == list(symbols["tensorrt_llm.plugin.plugin.PluginConfig"])
    assert (build["max_num_tokens"], build["speculative_decoding_mode"].name) == (8192, "NONE")
    assert (plugins["tokens_per_block"], plugins["use_paged_context_fmha"]) == (32, True)
    assert SpeculativeDecodingMode["DRAFT_TOKENS_EXTERNAL"] == 2
    loading = inspect.signature(PretrainedModel.from_checkpoint).parameters
    assert list(loading) == list(symbols["tensorrt_llm.models.modeling_utils.PretrainedModel.from_checkpoint"])


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("name", ["max_seqlen", "strongly_type", "auto_parallel_config"])
def test_unknown_options_fail(name: str) -> None:
    from tensorrt_llm.builder import BuildConfig
    from tensorrt_llm.plugin import PluginConfig

    with pytest.raises(TypeError, match=name):
        BuildConfig(**{name: 1})
    with pytest.raises(TypeError, match=name):
        PluginConfig(**{name: 1})
    with pytest.raises(AttributeError, match=name):
        setattr(BuildConfig(), name, 1)
    with pytest.raises(AttributeError, match=name):
        getattr(PluginConfig(), name)


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gemm_plugin", "fp32"),
        ("gpt_attention_plugin", "fp8"),
        ("use_paged_context_fmha", "yes"),
        ("user_buffer", None),
    ],
)
def test_options_hold_only_what_they_may(name: str, value: Any) -> None:
    from tensorrt_llm.plugin import PluginConfig

    with pytest.raises(ValueError, match=name):
        PluginConfig(**{name: value})
    with pytest.raises(ValueError, match=name):
        setattr(PluginConfig(), name, value)


def rebuilt(target: Path, *, quantization: dict[str, Any] | None = None, **plugins: Any) -> Any:
    """PluginConfig after build() of a recorded network; nothing of the plan's care."""
    from tensorrt_llm.builder import BuildConfig, build
    from tensorrt_llm.models.modeling_utils import PretrainedConfig
    from tensorrt_llm.plugin import PluginConfig

    from magicdec.plugins.trtllm_models import ExplicitForCausalLM

    values = json.loads((target / "config.json").read_text())
    values |= {"position_embedding_type": "learned_absolute", "num_positions": 80}
    values["quantization"] = quantization or values["quantization"]
    model = ExplicitForCausalLM.from_config(PretrainedConfig(**values))
    for _, parameter in model.named_parameters():
        parameter._value = torch.zeros(parameter.shape, dtype=_torch_dtype(parameter))
    options = BuildConfig(
        output_timing_cache=None, max_batch_size=4, max_seq_len=64, plugin_config=PluginConfig(**plugins)
    )
    return build(model, options).config.build_config.plugin_config


def _torch_dtype(parameter: Any) -> torch.dtype:
    from tensorrt_llm._utils import TORCH

    found: torch.dtype = TORCH[parameter.dtype]
    return found


@pytest.mark.parametrize(
    ("weights", "cache", "sm", "paged", "fp8"),
    [
        (None, None, 90, True, False),
        (None, "FP8", 90, False, False),
        ("FP8", "FP8", 90, True, True),
        ("FP8", "FP8", 80, False, False),
        ("FP8", None, 90, True, False),
        ("FP8", None, 80, True, False),
    ],
)
def test_silent_changes_of_context_attention(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: str | None,
    cache: str | None,
    sm: int,
    paged: bool,
    fp8: bool,
) -> None:
    monkeypatch.setenv("MAGICDEC_STANDIN_SM", str(sm))
    ended = rebuilt(target, quantization={"quant_algo": weights, "kv_cache_quant_algo": cache})
    assert (ended.use_paged_context_fmha, ended.use_fp8_context_fmha) == (paged, fp8)


def test_other_silent_changes(target: Path) -> None:
    assert rebuilt(target, streamingllm=True).use_paged_context_fmha is False
    assert rebuilt(target, context_fmha=False).use_paged_context_fmha is False
    assert rebuilt(target, reduce_fusion=True).reduce_fusion is False
    assert rebuilt(target, user_buffer=True).user_buffer is False
    assert rebuilt(target).paged_state is False


def swap(name: str) -> Callable[[Driver, Tensors], None]:
    def change(_driver: Driver, tensors: Tensors) -> None:
        tensors[name] = tensors[name].flip(0)

    return change


def add(name: str, amount: int, index: Any = Ellipsis) -> Callable[[Driver, Tensors], None]:
    def change(_driver: Driver, tensors: Tensors) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][index] += amount

    return change


def both(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Driver, Tensors], None]:
    """The same change to a tensor and to its copy on the host."""

    def apply(_driver: Driver, tensors: Tensors) -> None:
        tensors[name], tensors[f"host_{name}"] = change(tensors[name]), change(tensors[f"host_{name}"])

    return apply


def resized(name: str, *shape: int) -> Callable[[Driver, Tensors], None]:
    def change(_driver: Driver, tensors: Tensors) -> None:
        tensors[name] = torch.zeros(shape, dtype=tensors[name].dtype)

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (swap("host_request_types"), r"contexts \(0\) first"),
        (add("host_request_types", 1, 1), r"contexts \(0\) first"),
        (add("host_context_lengths", 1, 0), "differ"),
        (both("context_lengths", lambda t: t + 1), "8 rows|5 rows"),
        (add("sequence_length", 1, 0), "host_past_key_value_lengths"),
        (add("sequence_length", -30, 0), "is less than the new tokens"),
        (add("sequence_length", 100), "KV capacity"),
        (add("host_past_key_value_lengths", -1, 0), "expected"),
        (add("host_past_key_value_lengths", 1, 1), "expected"),
        (add("host_sink_token_length", 4), "must be 0"),
        (add("host_context_progress", 1), "must be 0"),
        (add("host_max_attention_window_sizes", -1000), "host_max_attention_window_sizes"),
        (add("host_kv_cache_pool_mapping", 1, (0, 1)), "does not place each layer once"),
        (add("host_kv_cache_pool_pointers", 1 << 20, (0, 0)), "lie in no allocation"),
        (add("kv_cache_block_offsets", 2), "differ"),
        (both("kv_cache_block_offsets", lambda t: t.flip(2)), "is no offset of K"),
        (both("kv_cache_block_offsets", lambda t: t + 4 * 4), "lie in no allocation"),
        (both("kv_cache_block_offsets", lambda t: t[..., :1].contiguous()), "needs block 1 of its table of 1"),
        (both("kv_cache_block_offsets", lambda t: t[:, :1].contiguous()), "sizes differ"),
        (add("last_token_ids", 1), "out of 1..5"),
        (add("last_token_ids", -1), "out of 1..5"),
        (add("input_ids", 128), "index of input_ids"),
        (add("position_ids", 60), "index of position_ids"),
        (resized("position_ids", 4), "sizes differ"),
        (resized("cache_indirection", 2, 1, 73), r"not between \[1, 1, 1\] and \[4, 1, 72\]"),
        (resized("cache_indirection", 2, 2, 72), "not between"),
        (resized("host_runtime_perf_knobs", 15), "not between"),
        (resized("input_ids", 65), "not between"),
    ],
)
def test_wrong_tensors_fail(driver: Driver, change: Callable[[Driver, Tensors], None], text: str) -> None:
    tensors = driver.tensors(MIXED, [False, True])
    change(driver, tensors)
    with pytest.raises(RuntimeError, match=text):
        driver.run(MIXED, **tensors)


def test_the_unchanged_step_runs(driver: Driver) -> None:
    assert driver.run(MIXED, **driver.tensors(MIXED, [False, True])).shape == (5, 128)


@pytest.mark.parametrize("name", ["host_request_types", "host_kv_cache_pool_pointers", "sequence_length", "input_ids"])
def test_misplaced_tensors_fail(driver: Driver, name: str) -> None:
    driver.run(MIXED)
    wrong = "device" if name.startswith("host_") else "host"
    tensor = driver.memory.place(driver.tensors(MIXED, [False, True])[name].clone(), wrong)
    driver.context.set_tensor_address(name, tensor.data_ptr())
    with pytest.raises(RuntimeError, match=f"{name}: is in {wrong} memory"):
        driver.context.execute_async_v3(0)


def test_memory_that_nobody_gave_out_fails(driver: Driver) -> None:
    driver.run(MIXED)
    stray = torch.zeros(64, dtype=torch.int32)
    driver.context.set_tensor_address("sequence_length", stray.data_ptr())
    with pytest.raises(RuntimeError, match="lie in no allocation"):
        driver.context.execute_async_v3(0)
    short = driver.memory.place(torch.zeros(1, dtype=torch.int32), "device")
    driver.context.set_tensor_address("sequence_length", short.data_ptr())
    with pytest.raises(RuntimeError, match="reach over its end"):
        driver.context.execute_async_v3(0)


def test_profiles_shapes_and_addresses_must_be_set(standin: Any, driver: Driver, target: Path) -> None:
    second = driver.engine.create_execution_context()
    with pytest.raises(standin.StandinError, match="no optimization profile"):
        second.set_input_shape("input_ids", (5,))
    second.set_optimization_profile_async(1, 0)
    with pytest.raises(standin.StandinError, match="not between"):
        second.set_input_shape("input_ids", (5,))
    with pytest.raises(standin.StandinError, match="profile 2 of 2"):
        second.set_optimization_profile_async(2, 0)
    with pytest.raises(standin.StandinError, match="missing"):
        second.execute_async_v3(0)
    with pytest.raises(standin.StandinError, match="no tensor 'tokens'"):
        second.set_tensor_address("tokens", 1)
    with pytest.raises(standin.StandinError, match="no address"):
        second.set_tensor_address("input_ids", 0)
    driver.context.set_optimization_profile_async(0, 0)
    assert "input_ids" in driver.context.infer_shapes()  # a change of profile forgets the shapes
    assert standin.Runtime(standin.Logger()).deserialize_cuda_engine((target / "config.json").read_bytes()) is None


def test_without_paged_context_attention_the_past_is_not_seen(driver: Driver) -> None:
    """As on a GPU: no error, wrong logits. That is why the plan insists on it."""
    right = driver.run(MIXED)
    for node in driver.engine._graph.nodes:
        if node.op == "gpt_attention":
            node.attrs["use_paged_context_fmha"] = False
    wrong = driver.run(MIXED)
    assert (wrong[:4] - right[:4]).abs().max() > 0.1
    torch.testing.assert_close(wrong[4], right[4])  # a generation looks at the cache


def test_an_attention_window_counts_the_current_token(driver: Driver) -> None:
    """A window of one token sees only itself: as if it stood alone."""
    tensors = driver.tensors(MIXED, [False, True])
    tensors["host_max_attention_window_sizes"].fill_(1)
    windowed = driver.run(MIXED, **tensors)
    for row, token in enumerate(range(20, 24)):
        alone = SequenceInput([5 + token], [token], 0, (1,), [16], 1)
        torch.testing.assert_close(windowed[row : row + 1], driver.run([alone]), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("standin")
class TestNetwork:
    """What a strongly typed network with the plugin refuses at build time."""

    @pytest.fixture(autouse=True)
    def _network(self, standin: Any) -> Any:
        from tensorrt_llm._common import Network, net_guard
        from tensorrt_llm.functional import Tensor
        from tensorrt_llm.plugin import PluginConfig

        network = Network(PluginConfig(dtype="float32", paged_kv_cache=True))
        with net_guard(network):
            self.rows = Tensor("rows", standin.float32, [-1, 8], {"rows": [[1, 2, 4]], "width": [8]})
            self.ids = Tensor("ids", standin.int32, [-1], {"rows": [[1, 2, 4]]})
            yield

    def test_types_do_not_mix(self) -> None:
        from tensorrt_llm import functional as F

        with pytest.raises(RuntimeError, match="cannot mix"):
            self.rows + F.cast(self.rows, "bfloat16")
        with pytest.raises(RuntimeError, match="types differ"):
            F.concat([self.rows, F.cast(self.rows, "bfloat16")], dim=1)
        with pytest.raises(RuntimeError, match="cannot mix"):
            F.matmul(self.rows, F.cast(self.rows, "float16"))
        with pytest.raises(AssertionError, match="indices"):
            F.embedding(self.rows, self.rows)

    def test_shapes_must_fit(self) -> None:
        from tensorrt_llm import functional as F

        with pytest.raises(RuntimeError, match="not known at build time"):
            F.split(self.rows, 1, dim=0)
        with pytest.raises(AssertionError, match="split of 8"):
            F.split(self.rows, [3, 4], dim=1)
        with pytest.raises(RuntimeError, match="view of"):
            self.rows.view(F.concat([F.shape(self.rows, 0), 3, 3]))
        with pytest.raises(RuntimeError, match="do not fit"):
            F.matmul(self.rows, F.constant(torch.zeros(7, 3).numpy()))

    @pytest.mark.parametrize(
        ("change", "error", "text"),
        [
            ({"sink_token": 1}, TypeError, "has no argument"),
            ({"host_context_lengths": None}, RuntimeError, "host_context_lengths"),
            ({"host_kv_cache_pool_mapping": None}, RuntimeError, "host_kv_cache_pool_mapping"),
            ({"num_kv_heads": 3}, RuntimeError, "qkv is"),
            ({"rotary_embedding_dim": 4}, AssertionError, "must be 0"),
        ],
    )
    def test_attention_wants_all_it_reads(self, change: dict[str, Any], error: type[Exception], text: str) -> None:
        from tensorrt_llm import functional as F

        names = [name for name in F._NEEDED if name not in change]
        given: dict[str, Any] = dict.fromkeys(names, self.ids)
        sizes = {"num_heads": 2, "num_kv_heads": 1, "hidden_size_per_head": 2, "q_scaling": 1.0, "layer_idx": 0}
        options = {"mask_type": F.AttentionMaskType.causal, "past_key_value": None, "qkv": self.rows}
        F.gpt_attention(**given, **{n: self.ids for n in F._NEEDED if n not in given}, **sizes, **options)
        with pytest.raises(error, match=text):
            F.gpt_attention(**given | sizes | options | change)


@pytest.mark.usefixtures("standin")
def test_loading_wants_every_weight_in_its_type(target: Path) -> None:
    from tensorrt_llm.models.modeling_utils import PretrainedConfig

    from magicdec.plugins.trtllm_models import ExplicitForCausalLM

    values = json.loads((target / "config.json").read_text())
    values |= {"position_embedding_type": "learned_absolute", "num_positions": 80}
    name = "transformer.layers.1.attention.q_layernorm.weight"

    def without(weights: Tensors) -> Tensors:
        return {key: data for key, data in weights.items() if key != name}

    def narrowed(weights: Tensors) -> Tensors:
        return weights | {name: weights[name].half()}

    for hook, text in ((without, "Required but not provided"), (narrowed, "expected")):
        with pytest.raises(RuntimeError, match=text) as caught:
            ExplicitForCausalLM.from_checkpoint(
                str(target), rank=0, config=PretrainedConfig(**values), preprocess_weights_hook=hook
            )
        assert name in str(caught.value)
    whole = ExplicitForCausalLM.from_checkpoint(str(target), rank=0, config=PretrainedConfig(**values))
    assert whole.unused == []
