"""Tensors of the models that speak text, and how they are passed on: `preprocessing` to `tensorrt_llm`."""

from typing import Final

from magicdec.runtime.triton_backend.llm.tensors import SHARED_OUTPUTS
from magicdec.runtime.triton_backend.tensor_spec import TensorSpec, optional, outputs, required

PREPROCESSING_INPUTS: Final[list[TensorSpec]] = [
    required("QUERY", "STRING"),
    required("REQUEST_OUTPUT_LEN", "INT32"),
    *optional("STRING", "DECODER_QUERY"),
    *optional("STRING", "BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS", dims=(-1,)),
    *optional("FP32", "EMBEDDING_BIAS_WEIGHTS", dims=(-1,)),
    *optional("INT32", "END_ID", "PAD_ID"),
    *optional("UINT64", "PROMPT_TABLE_EXTRA_ID"),
]
PREPROCESSING_OUTPUTS: Final[list[TensorSpec]] = [
    *outputs("INT32", "INPUT_ID", dims=(-1,)),
    *outputs("INT32", "REQUEST_INPUT_LEN"),
    *outputs("INT32", "BAD_WORDS_IDS", "STOP_WORDS_IDS", dims=(2, -1)),
    *outputs("FP32", "EMBEDDING_BIAS", dims=(-1,)),
    *outputs("INT32", "REQUEST_OUTPUT_LEN", dims=(-1,)),
    *outputs("INT32", "OUT_END_ID", "OUT_PAD_ID"),
]
POSTPROCESSING_INPUTS: Final[list[TensorSpec]] = [
    required("TOKENS_BATCH", "INT32", -1, -1),
    required("SEQUENCE_LENGTH", "INT32", -1),
]
POSTPROCESSING_OUTPUTS: Final[list[TensorSpec]] = outputs("STRING", "OUTPUT", dims=(-1,))

TEXT_INPUTS: Final[list[TensorSpec]] = [
    required("text_input", "STRING"),
    required("max_tokens", "INT32"),
    *optional("STRING", "decoder_text_input"),
    *optional("STRING", "bad_words", "stop_words", "embedding_bias_words", dims=(-1,)),
    *optional("FP32", "embedding_bias_weights", dims=(-1,)),
    *optional("BOOL", "exclude_input_in_output", "stream"),
    *optional("BOOL", "return_log_probs", "return_context_logits", "return_generation_logits"),
    *optional("BOOL", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
    *optional("INT32", "end_id", "pad_id", "top_k", "min_tokens", "num_return_sequences", "beam_width"),
    *optional("FP32", "temperature", "top_p", "length_penalty"),
    *optional("FP32", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *optional("UINT64", "seed", "prompt_table_extra_id", "lora_task_id"),
    *optional("INT32", "prompt_vocab_size"),
    *optional("FP16", "prompt_embedding_table", "lora_weights", dims=(-1, -1)),
    *optional("INT32", "lora_config", dims=(-1, 3)),
    *optional("STRING", "guided_decoding_guide_type", "guided_decoding_guide"),
    *optional("INT32", "num_draft_tokens"),
    *optional("BOOL", "use_draft_logits"),
]
# The TensorRT-LLM backend's `tensorrt_llm_bls` takes these; here they are refused by name.
IMAGE_INPUTS: Final[list[TensorSpec]] = [
    *optional("FP16", "image_input", dims=(-1, 3, -1, -1)),
    *optional("UINT8", "image_bytes_input", "video_bytes_input", dims=(-1, -1, -1, -1)),
    *optional("STRING", "image_url_input"),
]
TEXT_OUTPUTS: Final[list[TensorSpec]] = [*outputs("STRING", "text_output", dims=(-1,)), *SHARED_OUTPUTS]

# Inputs of `preprocessing` and the input of the whole that each takes.
TO_PREPROCESSING: Final[dict[str, str]] = {
    "QUERY": "text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "DECODER_QUERY": "decoder_text_input",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
# Inputs of `tensorrt_llm` and the output of `preprocessing` that each takes.
FROM_PREPROCESSING: Final[dict[str, str]] = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
}
_RENAMED: Final = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
# Inputs of `tensorrt_llm` and the input of the whole that each takes, past `preprocessing`.
TO_LLM: Final[dict[str, str]] = {
    _RENAMED.get(tensor.name, tensor.name): tensor.name
    for tensor in TEXT_INPUTS
    if tensor.name not in TO_PREPROCESSING.values()
}
# Outputs of `tensorrt_llm` and of the whole.
FROM_LLM: Final[dict[str, str]] = {"output_text": "text_output"} | {
    tensor.name: tensor.name for tensor in SHARED_OUTPUTS
}
