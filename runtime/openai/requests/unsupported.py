"""Fields of OpenAI's and vLLM's requests that are not supported: refused by name, unless they ask for nothing."""

from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """What to do instead, and the values that ask for nothing (null always does)."""

    mend: str
    neutral: tuple[Any, ...] = ()


_TOOLS = "tools are not supported; describe them in a message"
_CONSTRAINED = "constrained output is not supported"
_BEAMS = "beam search is not supported; use n with temperature > 0"
_MEDIA = "only text is supported"
_TEMPLATE = "the model's own chat template is used; for another, render it and use /v1/completions"

UNSUPPORTED: dict[str, Refusal] = {
    "add_generation_prompt": Refusal(_TEMPLATE, (True,)),
    "add_special_tokens": Refusal("give token ids to choose them yourself"),
    "audio": Refusal(_MEDIA),
    "best_of": Refusal("use n and choose among the choices", (1,)),
    "chat_template": Refusal(_TEMPLATE),
    "chat_template_kwargs": Refusal(_TEMPLATE, ({},)),
    "continue_final_message": Refusal(_TEMPLATE, (False,)),
    "documents": Refusal("put them into a message"),
    "early_stopping": Refusal(_BEAMS, (False,)),
    "function_call": Refusal(_TOOLS, ("none",)),
    "functions": Refusal(_TOOLS, ([],)),
    "guided_choice": Refusal(_CONSTRAINED),
    "guided_decoding_backend": Refusal(_CONSTRAINED),
    "guided_grammar": Refusal(_CONSTRAINED),
    "guided_json": Refusal(_CONSTRAINED),
    "guided_regex": Refusal(_CONSTRAINED),
    "include_stop_str_in_output": Refusal("a stop string is always cut off", (False,)),
    "length_penalty": Refusal(_BEAMS, (1,)),
    "metadata": Refusal("answers are not stored; leave it out", ({},)),
    "modalities": Refusal(_MEDIA, (["text"],)),
    "parallel_tool_calls": Refusal(_TOOLS, (True, False)),
    "prediction": Refusal("the engine drafts by itself; leave it out"),
    "priority": Refusal("requests are served in the order of their arrival", (0,)),
    "prompt_cache_key": Refusal("prompts that begin alike share their cache anyway; leave it out"),
    "prompt_logprobs": Refusal("only logprobs of output tokens are supported"),
    "reasoning_effort": Refusal("say in a message how much to reason"),
    "response_format": Refusal(_CONSTRAINED, ({"type": "text"},)),
    "return_tokens_as_token_ids": Refusal("tokens are given as text", (False,)),
    "safety_identifier": Refusal("use user"),
    "service_tier": Refusal("there is one tier", ("auto", "default")),
    "skip_special_tokens": Refusal("special tokens are always left out of the text", (True,)),
    "spaces_between_special_tokens": Refusal("special tokens are always left out of the text", (True,)),
    "store": Refusal("answers are not stored", (False,)),
    "structured_outputs": Refusal(_CONSTRAINED),
    "suffix": Refusal("write the insertion's format into the prompt"),
    "tool_choice": Refusal(_TOOLS, ("none", "auto")),
    "tools": Refusal(_TOOLS, ([],)),
    "truncate_prompt_tokens": Refusal("shorten the prompt before the call"),
    "use_beam_search": Refusal(_BEAMS, (False,)),
    "verbosity": Refusal("say in a message how long the answer should be"),
    "web_search_options": Refusal("the server has no access to the web"),
}
