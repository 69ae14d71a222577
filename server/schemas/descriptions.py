"""What each request field does, for /openapi.json and the reference pages."""

from __future__ import annotations

from typing import Any

_SAMPLING = {
    "model": "a served name; default: the served model",
    "temperature": "divides the logits; 0 is greedy",
    "top_p": "sample from the most likely tokens with this total probability",
    "top_k": "sample from this many most likely tokens; 0 and -1: all",
    "min_p": "drop tokens less likely than this share of the most likely one",
    "repetition_penalty": "divides the scores of tokens of prompt and output",
    "frequency_penalty": "subtracted from a token's logit for each time it was generated",
    "presence_penalty": "subtracted once from the logits of generated tokens",
    "logit_bias": "added to the logits, by token id; -100 to 100",
    "stop": "strings that end the text; removed from it",
    "stop_token_ids": "tokens that end the text",
    "allowed_token_ids": "no other token is sampled",
    "bad_words": "words that are not generated",
    "max_tokens": "maximum number of generated tokens",
    "min_tokens": "nothing ends the text before this many tokens",
    "ignore_eos": "generate beyond the end-of-text token",
    "include_stop_str_in_output": "keep the stop string in the text",
    "no_stop_trim": "SGLang's name of include_stop_str_in_output",
    "skip_special_tokens": "leave special tokens out of the text",
    "n": "number of sequences per prompt",
    "seed": "of the random numbers; default: random",
    "stream": "answer as server-sent events",
    "stream_options": "options of a stream",
    "priority": "lower values run first",
    "response_format": "OpenAI's constraint: json_object or json_schema",
    "structured_outputs": "vLLM's constraint: json, regex, choice, grammar or structural_tag",
    "json_schema": "the output matches this JSON schema",
    "regex": "the output matches this regular expression",
    "ebnf": "the output follows this grammar",
    "structural_tag": "tags whose content is constrained",
    "cache_salt": "share cached prefixes only with requests of the same salt",
    "extra_key": "SGLang's name of cache_salt",
    "prompt_logprobs": "logprobs of the prompt's tokens and of this many most likely ones",
    "logprob_token_ids": "with logprobs: list these tokens instead of the most likely ones",
    "truncate_prompt_tokens": "keep this many tokens of the prompt; -1: what fits the context",
    "truncation_side": "side of the prompt that is cut off",
    "return_token_ids": "token ids of prompt and output in the answer",
    "return_weight_versions": "which weights produced which tokens; default: with return_token_ids",
    "return_tokens_as_token_ids": "write tokens of logprobs as token_id:5",
    "return_stats": "times and graph buckets in the answer",
    "return_hidden_states": "the last token's hidden state in the answer, if the server keeps them; not streamed",
}
_CONVERSATION = {
    "messages": "the conversation, for the model's chat template",
    "role": "system, developer, user, assistant or tool",
    "content": "text, or a list of parts",
    "tools": "functions that the model may call",
    "tool_choice": "none, auto, required, or a named function; default: auto if there are tools",
    "parallel_tool_calls": "false: at most one call",
    "add_generation_prompt": "end the prompt where the model's message begins",
    "continue_final_message": "end the prompt within the last message, which the answer continues",
    "chat_template": "replaces the model's template, if the server allows it",
    "chat_template_kwargs": "variables of the chat template",
    "enable_thinking": "variable of the chat template: reason before the answer",
    "verbosity": "variable of the chat template",
    "reasoning_effort": "variable of the chat template; none: no reasoning",
    "documents": "variable of the chat template",
    "system": "the system message: a text or text blocks",
    "thinking": "whether the model reasons before the answer, and for how many tokens",
    "output_config": "a JSON schema that the answer follows, and the effort of the reasoning",
    "output_format": "a JSON schema that the answer follows",
}
_TOKENIZE = {
    "tokens": "token ids",
    "add_special_tokens": "add the special tokens of the tokenizer",
    "return_token_strs": "vocabulary entries in the answer",
}

# Fields that mean the same in every body.
COMMON = _SAMPLING | _CONVERSATION | _TOKENIZE

# Body -> fields of that body only, or with another meaning there.
OF_BODY = {
    "CompletionBody": {
        "prompt": "a text, token ids, or a list of either",
        "echo": "begin the text with the prompt",
        "logprobs": "logprobs of the tokens and of this many most likely ones",
        "best_of": "generate this many sequences and return the best n",
    },
    "ChatBody": {
        "echo": "begin the content with the last message, if it is the assistant's",
        "add_special_tokens": "add the tokenizer's special tokens, besides the chat template's; default false",
        "max_completion_tokens": "maximum number of generated tokens; equals max_tokens if both are sent",
        "logprobs": "logprobs of the tokens in the answer",
        "top_logprobs": "with logprobs: the most likely tokens to list",
        "include_reasoning": "false: leave the reasoning out of the answer",
        "separate_reasoning": "false: leave the reasoning in the content",
        "thinking_token_budget": "maximum number of tokens of reasoning",
    },
    "GenerateBody": {
        "text": "a prompt or a list of prompts",
        "input_ids": "token ids of a prompt, or a list of such lists",
        "sampling_params": "for all prompts, or a list with one per prompt",
        "rid": "request id, or a list with one per prompt",
        "return_logprob": "logprobs in the answer",
        "logprob_start_len": "first position with logprobs; -1: only the output",
        "top_logprobs_num": "number of most likely tokens to list",
        "token_ids_logprob": "token ids whose logprobs to list, or a list of such lists with one per prompt",
        "return_text_in_logprobs": "texts of the tokens beside their ids",
    },
    "TokenGenerateBody": {
        "token_ids": "token ids of the prompt",
        "sampling_params": "sampling parameters",
        "request_id": "the request's id; default: that of the header X-Request-Id, or a new one",
        "return_token_ids": "token ids of the prompt in the answer",
        "return_sampling_mask": "the same in sampling_params",
        "return_routed_experts": "the same in sampling_params",
        "routed_experts_prompt_start": "the same in sampling_params",
    },
    "TokenSampling": {
        "return_kept_mass": "log of the probability that top_k, top_p and min_p left, for each token",
        "return_sampling_mask": "the ids that top_k, top_p and min_p left, for each token; and kept_mass",
        "return_routed_experts": "the experts of each token; default: as the server was started",
        "routed_experts_prompt_start": "the first prompt token whose experts are returned",
        "logprobs": "logprobs of the tokens and of this many most likely ones",
        "structured_outputs": "vLLM's constraint: json, regex, choice, grammar or structural_tag",
    },
    "SamplingOptions": {
        "max_new_tokens": "SGLang's name of max_tokens",
        "min_new_tokens": "SGLang's name of min_tokens",
        "sampling_seed": "SGLang's name of seed",
        "logprobs": "logprobs of the tokens and of this many most likely ones",
        "logprob_token_ids": "with return_logprob: list the logprobs of these tokens too",
        "show_markers": "keep special tokens that mark tools and reasoning in the text",
    },
    "ResponsesBody": {
        "input": "a text, or messages, calls, their results and reasoning",
        "instructions": "the system message",
        "previous_response_id": "continue this stored response",
        "store": "false: don't store the response",
        "background": "answer at once, and generate the response in the background",
        "text": "format of the answer: text, json_object or json_schema; verbosity, passed to the chat template",
        "reasoning": "effort, passed to the chat template",
        "include": "message.output_text.logprobs: logprobs of the text",
        "max_output_tokens": "maximum number of generated tokens, reasoning included",
        "top_logprobs": "the most likely tokens to list with each logprob",
        "metadata": "returned with the response",
    },
    "MessagesBody": {
        "stop_sequences": "strings that end the text; removed from it",
        "thread": "create: no effect; continue: refused, so that clients send the whole conversation",
    },
    "OllamaOptions": {
        "repeat_penalty": "divides the scores of tokens of prompt and output",
        "repeat_last_n": "-1: penalties count all tokens; 0: no penalties",
        "num_predict": "maximum number of generated tokens; -1: what the context holds",
    },
    "OllamaShowBody": {
        "name": "earlier name of model",
        "verbose": "no effect",
    },
    "StreamOptions": {
        "include_usage": "usage in a last chunk",
        "continuous_usage_stats": "usage so far in every chunk",
    },
    "TokenizeBody": {
        "prompt": "a text",
        "add_special_tokens": "add the special tokens of the tokenizer; default: to a prompt, not to messages",
    },
    "AbortRequestsBody": {"request_ids": "ids of answers, X-Request-Id, or rid; default: all requests"},
    "AbortRequestBody": {"rid": "the request's id", "abort_all": "abort all requests"},
    "PauseBody": {
        "mode": "abort, wait or keep",
        "wait_for_inflight_requests": "earlier name of the mode wait",
        "clear_cache": "drop cached prefixes, and with keep the KV of frozen requests",
    },
    "SleepBody": {
        "level": "0: pause only; 1: keep the weights in host memory; 2: discard them",
        "mode": "abort, wait or keep; default: as the pause there is, else abort",
    },
    "ReleaseKvBody": {"mode": "abort, wait or keep; default: as the pause there is, else abort"},
    "TagsBody": {"tags": "weights, kv_cache, cuda_graph; default: all"},
    "PauseGenerationBody": {"mode": "abort, retract or in_place"},
    "ResetPrefixCacheBody": {"reset_running_requests": "running requests compute their KV again"},
    "StartWeightUpdateBody": {
        "is_checkpoint_format": "whether tensors have their Hugging Face names, which is required",
    },
    "UpdateWeightsBody": {
        "update_info": "an object with weight_dir, as vLLM's clients wrap it",
        "weight_dir": "a safetensors file or folder on the server's host",
        "weight_version": "name of the new weights; default: update-N",
    },
    "FinishWeightUpdateBody": {"weight_version": "name of the new weights; default: update-N"},
    "UpdateWeightVersionBody": {
        "new_version": "name of the weights in use",
        "abort_all_requests": "abort all requests before",
    },
    "WeightCheckerBody": {
        "action": "checksum, compare or reset",
        "baseline": "checksums to compare with, by tensor",
    },
    "UpdateFromDiskBody": {
        "model_path": "a safetensors file or folder on the server's host",
        "load_format": "no effect: the format is safetensors",
        "weight_version": "name of the new weights; default: update-N",
        "abort_all_requests": "abort all requests before",
        "keep_pause": "not supported",
    },
    "WeightsByNameBody": {
        "name": "Hugging Face name of a tensor",
        "truncate_size": "number of rows to return",
    },
    "KVBlocksBody": {"block_hashes": "hashes of blocks, as KV events publish them"},
    "WeightsBody": {
        "path": "a safetensors file or folder on the server's host",
        "version": "name of the new weights",
    },
}  # fmt: skip
_POOLED = {
    "truncate_prompt_tokens": "keep this many tokens of an input; -1: what fits the context",
    "use_activation": "normalise a vector; apply a score's or a head's activation; default: as the model's folder says",
}
_INPUTS = _POOLED | {
    "input": "a text, token ids, or a list of either",
    "encoding_format": "float: a list of numbers; base64: of little-endian float32",
    "dimensions": "cut vectors to this many values, before they are normalised",
    "normalize": "divide vectors by their Euclidean norm; equals use_activation",
    "prompt_name": "which of the folder's prompts to write before texts",
    "truncation_side": "side of an input that is cut off; default: right",
}
_SCORED = _POOLED | {
    "max_tokens_per_query": "cut each query to this many tokens; 0: as it is",
    "max_tokens_per_doc": "cut each document to this many tokens; 0: as it is",
    "instruction": "what a match is, for models whose template reads it",
}
OF_BODY["EmbeddingBody"] = _INPUTS
OF_BODY["PoolingBody"] = _INPUTS | {
    "task": "embed, token_embed or classify; default: classify for a model with such a head"
}
OF_BODY["ScoreBody"] = _SCORED | {
    name: f"the {side}: a text or a list of texts"
    for side, names in {"queries": "text_1 queries data_1", "documents": "text_2 documents items data_2"}.items()
    for name in names.split()
}
OF_BODY["RerankBody"] = _SCORED | {
    "query": "a text",
    "documents": "texts, or objects with text",
    "top_n": "number of documents in the answer; default and 0: all",
    "return_documents": "false: leave the texts out of the answer",
}
_OLLAMA = {
    "options": "sampling parameters",
    "format": "json, or a JSON schema that the answer follows",
    "think": "whether the model reasons before the answer, or how much: low, medium or high",
    "stream": "answer as lines of JSON; default true",
    "logprobs": "logprobs of the tokens in the answer",
    "top_logprobs": "with logprobs: the most likely tokens to list",
}
OF_BODY["OllamaChatBody"] = _OLLAMA
OF_BODY["OllamaGenerateBody"] = _OLLAMA | {
    "prompt": "a text, for the model's chat template",
    "raw": "generate from the prompt as it is, without the chat template",
}
OF_BODY["OllamaMessage"] = {
    "thinking": "the reasoning of an earlier answer",
    "images": "not supported",
    "tool_calls": "calls of an earlier answer",
    "tool_name": "the function whose result this is",
    "tool_call_id": "the call whose result this is; default: the first one without a result",
}
_GROUP = {
    "master_address": "host of the trainer's group of processes",
    "master_port": "port of the trainer's group of processes, which rank 0 listens on",
    "rank_offset": "this server's rank; default 1",
    "world_size": "number of processes in the group: rank_offset + 1",
    "group_name": "name of the group",
    "backend": "gloo or nccl; default: by the server's device",
}
_TENSORS = {
    "names": "names of the tensors, in the order in which they are sent",
    "dtypes": "dtype of each tensor, such as bfloat16",
    "shapes": "shape of each tensor",
}
OF_BODY["InitTransferBody"] = {"init_info": "where the trainer's group of processes is, and whether tensors are packed"}
OF_BODY["InitUpdateGroupBody"] = _GROUP
OF_BODY["DestroyUpdateGroupBody"] = {"group_name": _GROUP["group_name"]}
OF_BODY["DistributedUpdateBody"] = _TENSORS | {
    "group_name": _GROUP["group_name"],
    "weight_version": "name of the new weights",
    "abort_all_requests": "abort all requests before",
    "load_format": "flattened_bucket: all tensors come in one buffer",
}
OF_BODY["TensorUpdateBody"] = {
    "serialized_named_tensors": "base64 of pickled handles of tensors in a GPU's memory; the first entry is read",
    "load_format": "flattened_bucket: all tensors are in one buffer",
    "weight_version": "name of the new weights",
    "abort_all_requests": "abort all requests before",
}
OF_BODY["CollectiveRpcBody"] = {
    "method": "skyrl_start_weight_update, update_weights_ipc or skyrl_finish_weight_update",
    "args": "none",
    "kwargs": "update_info of update_weights_ipc: names, dtype_names, shapes, sizes and ipc_handles_pickled",
}
OF_BODY["BatchChatBody"] = OF_BODY["ChatBody"] | {"messages": "conversations, each a list of messages"}


def describe_fields(properties: dict[str, Any], body: str) -> None:
    """Add descriptions to the fields of a body's JSON schema."""
    known = COMMON | OF_BODY.get(body, {})
    for name, schema in properties.items():
        if name in known:
            schema["description"] = known[name]
