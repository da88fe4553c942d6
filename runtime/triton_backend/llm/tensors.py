"""Tensors of the model `tensorrt_llm`: token ids in, token ids out. Names and types are the TensorRT-LLM backend's."""

from typing import Final

from magicdec.runtime.triton_backend.tensor_spec import TensorSpec, optional, outputs, required

# What a request can ask for.
SUPPORTED_INPUTS: Final[list[TensorSpec]] = [
    *optional("INT32", "input_ids", dims=(-1,)),  # a request to stop another has none
    required("input_lengths", "INT32", scalar=True),
    required("request_output_len", "INT32", scalar=True),
    *optional("INT32", "end_id", "pad_id", "num_return_sequences", "runtime_top_k", "min_tokens", scalar=True),
    *optional("FP32", "temperature", "runtime_top_p", scalar=True),
    *optional("FP32", "repetition_penalty", "presence_penalty", "frequency_penalty", scalar=True),
    *optional("UINT64", "seed", scalar=True),
    *optional("INT32", "stop_words_list", "bad_words_list", dims=(2, -1)),
    *optional("FP32", "embedding_bias", dims=(-1,)),
    *optional("BOOL", "return_log_probs", "return_perf_metrics", scalar=True),
    *optional("BOOL", "return_num_input_tokens", "return_num_output_tokens", scalar=True),
    *optional("BOOL", "exclude_input_in_output", "stop", "streaming", scalar=True),
    # Beyond the TensorRT-LLM backend, whose token-level model leaves drafting to its caller.
    *optional("INT32", "num_draft_tokens", scalar=True),
    *optional("BOOL", "use_draft_logits", scalar=True),
]

# Taken only with a value that changes nothing: clients fill these in by habit.
NEUTRAL_INPUTS: Final[list[TensorSpec]] = [
    *optional("INT32", "beam_width", "runtime_top_p_reset_ids", scalar=True),
    *optional("FP32", "len_penalty", "beam_search_diversity_rate", scalar=True),
    *optional("FP32", "runtime_top_p_min", "runtime_top_p_decay", scalar=True),
    *optional("BOOL", "early_stopping", "return_context_logits", "return_generation_logits", scalar=True),
]

# Refused by name.
REFUSED_INPUTS: Final[list[TensorSpec]] = [
    *optional("INT32", "draft_input_ids", dims=(-1,)),
    *optional("FP32", "draft_logits", dims=(-1, -1)),
    *optional("FP32", "draft_acceptance_threshold", scalar=True),
    *optional("INT32", "decoder_input_ids", dims=(-1,)),
    *optional("INT32", "decoder_input_lengths", scalar=True),
    *optional("FP16", "prompt_embedding_table", dims=(-1, -1)),
    *optional("UINT64", "prompt_table_extra_ids", dims=(-1,)),
    *optional("INT32", "prompt_vocab_size", scalar=True),
    *optional("UINT64", "lora_task_id", scalar=True),
    *optional("FP16", "lora_weights", dims=(-1, -1)),
    *optional("INT32", "lora_config", dims=(-1, 3)),
    *optional("STRING", "guided_decoding_guide_type", "guided_decoding_guide"),
    *optional("INT32", "retention_token_range_starts", "retention_token_range_ends", dims=(-1,)),
    *optional("INT32", "retention_token_range_priorities", "retention_token_range_durations_ms", dims=(-1,)),
    *optional("INT32", "retention_decode_priority", "retention_decode_duration_ms"),
    *optional("INT32", "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
]
INPUTS: Final = [*SUPPORTED_INPUTS, *NEUTRAL_INPUTS, *REFUSED_INPUTS]

# Log-probabilities, counts and times: the same in all models that generate.
SHARED_OUTPUTS: Final[list[TensorSpec]] = [
    *outputs("FP32", "cum_log_probs", dims=(-1,)),
    *outputs("FP32", "output_log_probs", dims=(-1, -1)),
    *outputs("INT32", "batch_index", "sequence_index"),
    *outputs("INT32", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *outputs("INT64", "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *outputs("FP32", "acceptance_rate"),
    *outputs("INT32", "total_accepted_draft_tokens", "total_draft_tokens"),
    *outputs("INT32", "num_input_tokens", "num_output_tokens"),
]
OUTPUTS: Final[list[TensorSpec]] = [
    *outputs("INT32", "output_ids", dims=(-1, -1)),
    *outputs("INT32", "sequence_length", dims=(-1,)),
    # Beyond the TensorRT-LLM backend: the text of these tokens, by a decoder that knows those before them.
    *outputs("STRING", "output_text", dims=(-1,)),
    *outputs("STRING", "error"),  # in place of an error, for a caller that asks for it by a parameter
    *SHARED_OUTPUTS,
]
