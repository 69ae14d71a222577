"""Response bodies of all routes but Anthropic's, Ollama's and the Responses API, for /openapi.json and for tests.

Routes build plain dicts and do not use these models at run time. Every model forbids unknown fields.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]
StopReason = int | str | None


class Answer(BaseModel):
    """Base of response bodies. Unknown fields are forbidden."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    """The error, and the body field that caused it, if any."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The body of every response of 400 and above."""

    error: ErrorDetail


class CachedTokens(Answer):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class Usage(Answer):
    """Token counts of a request. The details are null without `--enable-prompt-tokens-details` in vLLM's mode."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None
    completion_tokens_details: None = None


class Stats(Answer):
    """How a request ran, with `return_stats`. `graph_buckets` counts tokens by decode graph, or "eager"."""

    queue_seconds: float | None
    first_token_seconds: float | None
    graph_buckets: dict[str, int]


class WeightSpan(Answer):
    """The output tokens [start, end), which weights of one version produced."""

    version: str
    start: int
    end: int


class CompletionLogprobs(Answer):
    """Parallel lists with one entry per token. The first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(Answer):
    """A token's logprob and rank, 1 for the most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]


class CompletionChoice(Answer):
    """One completion. `stop_reason` is the stop string or token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    hidden_states: list[float | None] | None = None
    routed_experts: None = None
    weight_versions: list[WeightSpan] | None = None


class VllmKeys(Answer):
    """Keys of vLLM's responses, which are null with `--compat vllm` and left out otherwise."""

    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class Completion(VllmKeys):
    """Response of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    stats: Stats | None = None


class TokenScore(Answer):
    """A token, its logprob, and its UTF-8 bytes; null for part of a character if the token is written as an id."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenScore(TokenScore):
    """The sampled token and the most likely alternatives; with `logprob_token_ids` itself and those tokens."""

    top_logprobs: list[TokenScore]


class ChatLogprobs(Answer):
    """Logprobs of a chat choice, one entry per token."""

    content: list[ChosenScore]
    refusal: None


class CalledFunction(Answer):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ToolCall):
    """A tool call in a chunk, with its place among the choice's calls."""

    index: int


class ChatMessage(Answer):
    """The model's message. `reasoning` and `reasoning_content` are the same text under both names in use."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class ChatChoice(Answer):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: list[int] | None = None
    hidden_states: list[float | None] | None = None
    routed_experts: None = None
    weight_versions: list[WeightSpan] | None = None


class ChatCompletion(VllmKeys):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    stats: Stats | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(Answer):
    """The change in a chunk: the role first, then reasoning, content or tool calls."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    """One choice of a chunk. The last chunk of a choice has its finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason
    token_ids: list[int] | None = None
    weight_versions: list[WeightSpan] | None = None


class ChatChunk(Answer):
    """A chunk of a /v1/chat/completions stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    stats: Stats | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: None = None


class ModelPermission(Answer):
    """What may be done with a model; the same for all, as in vLLM."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: None
    is_blocking: bool


class Model(Answer):
    """A name under which the model is served, its context length, and what messages may contain.

    `root` is the model as the server was told to load it, `sampling_defaults` its sampling parameters for fields that a
    request leaves out.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    permission: list[ModelPermission]
    max_model_len: int
    input_modalities: list[str]
    sampling_defaults: dict[str, Any]


class ModelList(Answer):
    """Every name under which the model is served."""

    object: Literal["list"]
    data: list[Model]


class GeneratedFinish(Answer):
    """Why a sequence ended. `matched`: the stop string or token id. `length`: the number of tokens."""

    type: FinishReason
    length: int | None = None
    matched: StopReason = None


Triple = list[float | int | str | None]


class GeneratedMeta(Answer):
    """Metadata of a /generate output. Logprobs are [logprob, token id, text or null]."""

    id: str
    finish_reason: GeneratedFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[WeightSpan]
    e2e_latency: float
    output_token_logprobs: list[Triple] | None = None
    output_top_logprobs: list[list[Triple]] | None = None
    output_token_ids_logprobs: list[list[Triple]] | None = None
    input_token_logprobs: list[Triple] | None = None
    input_top_logprobs: list[list[Triple] | None] | None = None
    input_token_ids_logprobs: list[list[Triple] | None] | None = None


class Generated(Answer):
    """Output of /generate; a stream's events hold the whole output so far. `index` is set in streams of a list."""

    text: str
    output_ids: list[int]
    meta_info: GeneratedMeta
    index: int | None = None


class TokenIdScore(Answer):
    """A token, written as `token_id:5`, and its logprob."""

    token: str
    logprob: float
    bytes: None = None


class ChosenIdScore(TokenIdScore):
    """The sampled token and the most likely alternatives, or with `logprob_token_ids` those tokens."""

    top_logprobs: list[TokenIdScore]


class TokenIdLogprobs(Answer):
    """Logprobs of generated tokens, one entry per token."""

    content: list[ChosenIdScore]


class RoutedExperts(Answer):
    """Experts of the tokens from `start` on, the prompt's and all generated ones but the last, by layer with experts.

    `data` is base64 of an array of this `shape`, [tokens, layers, experts per token], and `dtype`: little endian, in
    rows.
    """

    data: str
    shape: list[int]
    dtype: Literal["uint8", "int16"]
    start: int


class TokenGeneratedChoice(Answer):
    """One sequence. In a stream `token_ids` are the new ones; the last chunk of a choice has `weight_versions`.

    `kept_mass` and `sampling_mask` have one entry per token; the mask is null if nothing is cut off.
    """

    index: int
    token_ids: list[int]
    logprobs: TokenIdLogprobs | None
    finish_reason: FinishReason | None
    weight_versions: list[WeightSpan] | None
    kept_mass: list[float] | None = None
    sampling_mask: list[list[int]] | None = None
    routed_experts: RoutedExperts | None = None


class TokenGenerated(Answer):
    """Response of /inference/v1/generate."""

    request_id: str
    model: str
    choices: list[TokenGeneratedChoice]
    prompt_logprobs: PromptLogprobs | None
    kv_transfer_params: None
    usage: Usage
    prompt_token_ids: list[int] | None = None


class Tokenized(Answer):
    """Response of /tokenize. `token_strs` is the vocabulary entry of each token, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(Answer):
    """Response of /tokenizer_info: the settings of tokenizer_config.json."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    vocab_size: int
    chat_template: str | dict[str, str] | None = None
    added_tokens_decoder: dict[str, dict[str, Any]]


class Detokenized(Answer):
    """Response of /detokenize."""

    prompt: str


class Health(Answer):
    """Liveness. "dead" comes with status 503."""

    status: Literal["ok", "dead"]


class Load(Answer):
    """Response of /load: requests without a complete response, of all API workers."""

    server_load: int


class ServerInfo(Answer):
    """Response of /server_info: vLLM's three sections, then SGLang's names. `vllm_config` is text by default."""

    vllm_config: str | dict[str, Any]
    vllm_env: dict[str, str]
    system_env: dict[str, str]
    version: str
    model_path: str
    served_model_name: str
    device: str
    dtype: str
    tp_size: int
    context_length: int
    page_size: int
    max_total_num_tokens: int
    max_running_requests: int
    max_prefill_tokens: int
    mem_fraction_static: float | None
    random_seed: int | None
    weight_version: str
    sampling_defaults: dict[str, Any]
    tool_call_parser: str
    reasoning_parser: str
    internal_states: list[dict[str, Any]]


class Version(Answer):
    """The distribution's version."""

    version: str


class Ready(Answer):
    """Readiness, the reasons if not ready, and the warm-up progress, which is empty while the model is loaded."""

    ready: bool
    reasons: list[str]
    warm: dict[str, Any]


class Graphs(Answer):
    """The graph table: one row per wanted, captured or failed graph.

    Graphs share one memory pool of `pool_bytes`; the sum of the rows' bytes exceeds it. A row's `digest` is a hash of
    what its replay runs: `nodes` operations or kernels, of whose arguments `unverified_bytes` are left out. `shadow`
    says how it compared with eager in its last of `shadow_checks`.
    """

    model: str
    warm: dict[str, Any]
    pool_bytes: int
    graphs: list[dict[str, Any]]


class Warming(Answer):
    """Number of graphs to be captured."""

    pending: int


class Dropped(Answer):
    """Number of dropped graphs."""

    dropped: int


class Recapturing(Answer):
    """Numbers of dropped graphs and of graphs to be captured."""

    dropped: int
    pending: int


class WeightsUpdated(Answer):
    """Number of updated tensors, and the new weight version."""

    updated: int
    weight_version: str


class Status(Answer):
    """What was done."""

    status: str


class SGLangStatus(Answer):
    """What was done, in SGLang's format."""

    message: str
    status: Literal["ok"]


class IsPaused(Answer):
    """Whether generation is paused."""

    is_paused: bool


class Sleeping(Answer):
    """What was done."""

    status: Literal["sleeping"]
    level: int


class IsSleeping(Answer):
    """Whether the engine sleeps."""

    is_sleeping: bool


class KVBlock(Answer):
    """A block of the KV cache, and where it is: GPU, CPU or DISK."""

    block_hash: int
    group_idx: int
    mediums: list[str]


class KVBlocksFound(Answer):
    """The blocks that are held."""

    blocks: list[KVBlock]


class KVBlockList(KVBlocksFound):
    """Form and number of the blocks: tokens of a block, its bytes, the weights' version, and blocks by medium."""

    block_size: int
    block_bytes: int
    weight_version: str
    num_blocks: dict[str, int]


class KVBlocksImported(Answer):
    """Number of blocks that are new, and of those that were held already."""

    imported: int
    present: int


class Aborted(Answer):
    """Number of requests that were aborted."""

    status: Literal["aborted"]
    aborted: int


class Success(Answer):
    """What was done."""

    success: Literal[True]
    message: str


class RpcResults(Answer):
    """What each process returned: nothing."""

    results: list[None]


class Message(Answer):
    """What was done."""

    message: str


class WeightsWritten(Message):
    """Number of tensors that were written, 0 for a part of an update, and the version of the weights in use."""

    updated: int
    weight_version: str


class VersionSet(Success):
    """The new name of the weights."""

    new_version: str


class WeightInfo(Answer):
    """The version of the weights in use."""

    weight_version: str


class WeightsChecked(Answer):
    """Answer of /weight_checker: `checksums` by tensor, `match` and `mismatches`, or `status`."""

    checksums: dict[str, str] | None = None
    match: bool | None = None
    mismatches: list[str] | None = None
    status: Literal["reset"] | None = None
    weight_version: str | None = None


class DiskUpdate(Success):
    """Answer of /update_weights_from_disk."""

    num_paused_requests: Literal[0]
    weight_version: str


class WorldSize(Answer):
    """Number of ranks."""

    world_size: int


class ServedModel(Answer):
    """Answer of /get_model_info."""

    model_path: str
    tokenizer_path: str
    is_generation: Literal[True]
    preferred_sampling_params: None
    weight_version: str
    architectures: list[str]
    dtype: str


class Profiling(Answer):
    """Profiling has started."""

    profiling: Literal[True]


class Profiled(Answer):
    """Profiling has stopped. `file` is the trace on the server's host."""

    profiling: Literal[False]
    file: str = Field(description="a Chrome trace, for chrome://tracing or ui.perfetto.dev")


class Embedding(Answer):
    """The vector of an input: numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["embedding"]
    embedding: list[float | None] | str


class Embeddings(Answer):
    """Response of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class PooledInput(Answer):
    """What an input was pooled to: a vector, or one per token, as numbers or base64 of little-endian float32."""

    index: int
    object: Literal["pooling"]
    data: list[float | None] | list[list[float | None]] | str


class Pooled(Answer):
    """Response of /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledInput]
    usage: Usage


class Score(Answer):
    """How well a document matches its query."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Answer):
    """Response of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RerankUsage(Answer):
    """Token counts of /v1/rerank."""

    prompt_tokens: int
    total_tokens: int


class RerankedText(Answer):
    """The text of a document."""

    text: str


class RerankedDocument(Answer):
    """A document by its index in the request, and how well it matches the query."""

    index: int
    document: RerankedText | None = None
    relevance_score: float


class Reranked(Answer):
    """Response of /v1/rerank, best document first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankedDocument]
