"""Fields of requests that other servers have and this one does not build: those that are refused, and those that
change no answer.

`tests/runtime/serving/request_fields.json` lists the fields of OpenAI and vLLM, with the version of its sources.
"""

from collections.abc import Mapping
from typing import Any

# fields that would change the answer: the reason of the refusal, and the values that ask for nothing
Refusals = Mapping[str, tuple[str, list[Any]]]
_FREE = "this server cannot constrain the form of an answer yet, it writes plain text"
_TEXT = "this server reads and writes plain text"
_SAMPLER = "this server does not have this sampler"
_OTHER_NAME = "this server has it by another name: "
REFUSED: Refusals = {
    # OpenAI
    "response_format": (_FREE, [{"type": "text"}]),
    # vLLM, also of earlier versions
    "structured_outputs": (_FREE, []),
    "guided_json": (_FREE, []),
    "guided_json_object": (_FREE, [False]),
    "guided_regex": (_FREE, [""]),
    "guided_choice": (_FREE, [[]]),
    "guided_grammar": (_FREE, [""]),
    "guided_decoding_backend": (_FREE, []),
    "guided_whitespace_pattern": (_FREE, []),
    "structural_tag": (_FREE, [""]),
    "logits_processors": ("logit_bias, allowed_token_ids and bad_words change logits", [[]]),
    "use_beam_search": ("this server samples", [False]),
    "length_penalty": ("this server samples, and ranks no beams", [1]),
    "thinking_token_budget": ("this server cannot limit the reasoning of a model", [-1]),
    "truncate_prompt_tokens": ("this server does not shorten a prompt", []),
    "prompt_embeds": ("a prompt is a text or token IDs", []),
    "logprob_token_ids": ("logprobs list the most likely tokens", [[]]),
    "repetition_detection": ("this server does not end an answer for its repetitions", []),
    "max_repetition_pattern_size": ("this server does not end an answer for its repetitions", [0]),
    "min_repetition_pattern_size": ("this server does not end an answer for its repetitions", [0]),
    "repetition_min_count": ("this server does not end an answer for its repetitions", [0]),
    # llama.cpp and programs that embed it; clients send many of them, turned off
    "grammar": (_FREE, [""]),
    "grammar_string": (_FREE, [""]),
    "json_schema": (_FREE, [""]),
    "typical_p": (_SAMPLER, [1]),
    "dry_multiplier": (_SAMPLER, [0]),
    "mirostat": (_SAMPLER, [0]),
    "mirostat_mode": (_SAMPLER, [0]),
    "xtc_probability": (_SAMPLER, [0]),
    "dynatemp_range": (_SAMPLER, [0]),
    "top_n_sigma": (_SAMPLER, [0, -1]),
    "top_a": (_SAMPLER, [0]),
    "tfs": (_SAMPLER, [1]),
    "smoothing_factor": (_SAMPLER, [0]),
    "repeat_penalty": (_OTHER_NAME + "repetition_penalty", [1]),
    "n_probs": (_OTHER_NAME + "logprobs", [0]),
    "banned_strings": (_OTHER_NAME + "bad_words", [[], ""]),
    # SGLang
    "regex": (_FREE, [""]),
    "ebnf": (_FREE, [""]),
    # Ollama
    "format": (_FREE, [""]),
}
# refused fields that may have the value of another field: clients send a number under both names
SAME_AS: Mapping[str, str] = {"repeat_penalty": "repetition_penalty"}
CHAT_REFUSED: Refusals = {
    "functions": ("tools replaced it", [[]]),
    "function_call": ("tool_choice replaced it", ["none", "auto"]),
    "modalities": (_TEXT, [["text"]]),
    "audio": (_TEXT, []),
    "mm_processor_kwargs": (_TEXT, [{}]),
    "media_io_kwargs": (_TEXT, [{}]),
    "web_search_options": ("this server does not search", []),
    "moderation": ("this server has no moderation", []),
    "verbosity": ("this server cannot choose the length of an answer; max_completion_tokens limits it", ["medium"]),
    "documents": ("chat_template_kwargs can pass variables to the chat template", [[]]),
    "chat_template": ("this server uses the chat template of the model's tokenizer", []),
    "add_special_tokens": ("the chat template writes the start token", [False]),
    "echo": ("the answer has only the new message", [False]),
}
# fields that change no token of an answer here, and why
WITHOUT_INFLUENCE: Mapping[str, str] = {
    "user": "names the client's user",
    "safety_identifier": "names the client's user",
    "metadata": "labels for a list of stored answers",
    "store": "no answer is stored",
    "service_tier": "there is one tier",
    "priority": "slots go to the client with the fewest running sequences",
    "prediction": "a guess that makes the same answer faster",
    "prompt_cache_key": "a prefix is found by its tokens",
    "prompt_cache_options": "a prefix is found by its tokens",
    "prompt_cache_retention": "a prefix is kept until its slot is needed",
    "cache_salt": "a prefix is found by its tokens; its reuse changes the time of an answer",
    "parallel_tool_calls": "this server writes no tool calls yet",
    "include_reasoning": "the reasoning is a part of the answer's text",
    "spaces_between_special_tokens": "no space is put between special tokens",
    "request_id": "the header x-request-id names a request",
    "kv_transfer_params": "prefill and decoding are in one process",
    "vllm_xargs": "for extensions of vLLM",
}
