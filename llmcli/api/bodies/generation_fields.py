"""The fields that all generating APIs share: those of llama-server, of vLLM and of llmcli itself.

A client may use them with any API, because clients of one API pass fields of another through
(`extra_body` of OpenAI's client). Each class has the fields of one reference. An API that has a
field of the same name with another meaning defines it again.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from llmcli.api.bodies.base import (
    Either,
    MaxEntries,
    RequestBody,
    WholeNumber,
    honored,
    ignored,
    noted,
    refused,
)
from llmcli.api.bodies.sampling_fields import SamplingFields

MAX_TOKENS = 2**31 - 1
MAX_STOPS, MAX_STOP_TOKENS = 1024, 1024
MAX_PRIORITY = 100
MAX_SAMPLERS = 64

TokenLimit = Annotated[int, WholeNumber(-1, MAX_TOKENS)]
Texts = Annotated[str | list[str], Either("text or a list of texts"), MaxEntries(MAX_STOPS)]
NO_BUDGET = "only chat completions and responses have it; /v1/messages has thinking.budget_tokens"
OWN_CACHE = "the cache is shared by all requests and manages itself"


class StreamOptions(RequestBody):
    """Options of a stream."""

    origin: ClassVar[str] = "OpenAI"
    include_usage: bool | None = honored("end the stream with a chunk that has the token counts")
    include_obfuscation: Any = ignored("chunks are not padded")
    continuous_usage_stats: Any = noted("the counts come once, at the end")


class StructuredOutputs(RequestBody):
    """vLLM's description of the form of an answer; one of its fields may be set."""

    origin: ClassVar[str] = "vLLM"
    json_: Any = honored("a JSON schema that the answer follows", alias="json")
    regex: str | None = honored("a regular expression that the answer matches")
    choice: list[str] | None = honored("texts of which the answer is one")
    grammar: str | None = honored("a grammar (GBNF or Lark) that the answer follows")
    json_object: bool | None = honored("the answer is any JSON object")
    disable_fallback: Any = ignored("there is a single engine")
    disable_any_whitespace: Any = noted("white space in JSON is bounded")
    disable_additional_properties: Any = ignored("objects that list properties are closed")
    whitespace_pattern: str | None = refused("the white space in JSON is fixed")
    structural_tag: Any = refused("use tools, or a grammar")


class LlmcliFields(RequestBody):
    """Fields of llmcli itself."""

    origin: ClassVar[str] = "llmcli"
    beams: Any = honored("search with this many beams instead of sampling")
    length_penalty: Any = honored("exponent of the length in the score of a beam")
    early_stopping: Any = honored("when a beam search ends: yes, no or never")
    endless: bool | None = honored(
        "whether an answer that only repeats itself goes on; structured output always does"
    )
    priority: Annotated[int, WholeNumber(-MAX_PRIORITY, MAX_PRIORITY)] | None = honored(
        "waiting requests with a higher priority start first; above 0 only if the server allows it"
    )


class LlamaServerFields(RequestBody):
    """Fields of llama-server that all its generating endpoints have."""

    origin: ClassVar[str] = "llama-server"
    ignore_eos: bool | None = honored("continue after the model's end")
    grammar: str | None = honored("a grammar in GBNF that the answer follows")
    json_schema: Any = honored("a JSON schema that the answer follows")
    samplers: (
        Annotated[str | list[str], Either("a list of names, or text"), MaxEntries(MAX_SAMPLERS)]
        | None
    ) = honored("the sampler steps that run, in this order")
    n_indent: Annotated[int, WholeNumber(0, MAX_TOKENS)] | None = honored(
        "end the answer at a line that is indented by less"
    )
    t_max_predict_ms: Annotated[int, WholeNumber(-1, 2**53)] | None = honored(
        "end the answer with the first line end after this time"
    )
    t_max_prompt_ms: Any = ignored("a prompt is read completely; llama-server ignores this, too")
    post_sampling_probs: bool | None = honored(
        "with log-probabilities: return probabilities after the sampler steps"
    )
    cache_prompt: Any = ignored(OWN_CACHE)
    id_slot: Annotated[int, WholeNumber(-1, MAX_TOKENS)] | None = honored(
        "the slot whose cached tokens are used; -1: any"
    )
    n_keep: TokenLimit | None = honored(
        "with a context that slides: the first tokens of the prompt that stay; -1: all of it"
    )
    n_discard: Any = refused("a context that slides drops a part of its size", 0)
    n_cache_reuse: Any = ignored(OWN_CACHE)
    timings_per_token: bool | None = honored("each chunk of a stream has the timings so far")
    return_progress: bool | None = honored("a stream has the progress of the prompt")
    sse_ping_interval: Any = ignored("a stream sends a ping after 15 s of silence")
    verbose: bool | None = honored("the answer has the text of its prompt in __verbose.prompt")
    backend_sampling: Any = ignored("the server chooses where to sample")
    grammar_lazy: bool | None = refused("a grammar applies from the start, or after thinking")
    grammar_triggers: Any = refused("a grammar applies from the start, or after thinking")
    preserved_tokens: Any = ignored("control tokens of tool calls are always in the text")
    generation_prompt: str | None = refused("the chat template writes it")
    chat_format: Any = refused("the chat template decides it", 0)
    chat_parser: Any = refused("the chat template decides it")
    parse_tool_calls: Any = ignored("a field of chat completions")
    min_keep: Any = refused("the sampler steps keep at least one token", 0, 1)
    lora: Any = refused("load it with the model")
    adaptive_target: float | None = refused("the sampler adaptive-p is not supported")
    adaptive_decay: Any = ignored("it belongs to adaptive_target, which is refused")
    reasoning_control: Any = ignored("it belongs to chat completions")
    reasoning_budget_tokens: Any = refused(NO_BUDGET)
    thinking_budget_tokens: Any = refused(NO_BUDGET)
    reasoning_budget_message: Any = ignored("it belongs to reasoning_budget_tokens")
    reasoning_budget_start_tag: Any = ignored("it belongs to reasoning_budget_tokens")
    reasoning_budget_end_tag: Any = ignored("it belongs to reasoning_budget_tokens")
    reasoning_budget_end_tags: Any = ignored("it belongs to reasoning_budget_tokens")


class OpenAiFields(RequestBody):
    """Fields that OpenAI's chat completions and Responses API share."""

    origin: ClassVar[str] = "OpenAI"
    store: Any = ignored("nothing is stored")
    service_tier: Any = ignored("there is one tier")
    safety_identifier: Any = ignored("nothing is stored about users")
    prompt_cache_key: Any = ignored(OWN_CACHE)
    prompt_cache_options: Any = ignored(OWN_CACHE)
    prompt_cache_retention: Any = ignored(OWN_CACHE)
    moderation: Any = refused("this server moderates nothing")


class VllmFields(RequestBody):
    """Fields that vLLM adds to OpenAI's APIs."""

    origin: ClassVar[str] = "vLLM"
    use_beam_search: bool | None = honored("search with best_of or n beams")
    stop_token_ids: Annotated[list[int], MaxEntries(MAX_STOP_TOKENS)] | None = honored(
        "tokens that end the answer"
    )
    min_tokens: Annotated[int, WholeNumber(0, MAX_TOKENS)] | None = honored(
        "the answer has at least this many tokens"
    )
    allowed_token_ids: list[int] | None = honored("the answer consists of these tokens only")
    truncate_prompt_tokens: TokenLimit | None = honored(
        "shorten a prompt to this many tokens; -1: to the context"
    )
    truncation_side: Literal["left", "right"] | None = honored(
        "which end of a prompt truncate_prompt_tokens cuts off: left (default) or right"
    )
    structured_outputs: StructuredOutputs | None = honored("the form of the answer")
    guided_json: Any = honored("a JSON schema that the answer follows")
    guided_regex: str | None = honored("a regular expression that the answer matches")
    guided_choice: list[str] | None = honored("texts of which the answer is one")
    guided_grammar: str | None = honored("a grammar (GBNF or Lark) that the answer follows")
    guided_decoding_backend: Any = ignored("there is a single engine")
    guided_whitespace_pattern: str | None = refused("the white space in JSON is fixed")
    include_stop_str_in_output: bool | None = refused("an answer ends before its stop sequence")
    skip_special_tokens: bool | None = refused("special tokens are never in the text", True)
    spaces_between_special_tokens: Any = ignored("special tokens are never in the text")
    bad_words: Any = refused("use logit_bias with the text and false")
    prompt_logprobs: Any = refused("use echo with logprobs of /v1/completions")
    logprob_token_ids: Any = refused("use logprobs with top_logprobs")
    watermarking: Any = refused("answers have no watermark")
    repetition_detection: Any = refused(
        "an answer that only repeats itself ends by itself, unless endless is true"
    )
    thinking_token_budget: Any = refused(NO_BUDGET)
    return_tokens_as_token_ids: bool | None = honored(
        "log-probabilities name a token token_id:NUMBER"
    )
    return_token_ids: Any = refused("the entries of logprobs have the ids of tokens")
    return_token_offsets: Any = ignored("vLLM ignores it here, too")
    return_mm_kwargs: Any = ignored("there are no images")
    return_prompt_text: Any = refused("/apply-template returns the prompt")
    routed_experts_prompt_start: Any = ignored("the experts of tokens are not returned")
    cache_salt: Any = refused("start the server with --private: clients share no cache")
    logits_processors: Any = refused("the server runs no code of a request")
    kv_transfer_params: Any = refused("the cache is not transferred")
    ec_transfer_params: Any = refused("the cache is not transferred")
    vllm_xargs: Any = refused("the server has no extensions")
    stream_interval: Any = ignored("--stream-every of the server decides")
    request_id: Any = ignored("an answer has an id of its own")
    session_id: Any = ignored(OWN_CACHE)
    mm_processor_kwargs: Any = ignored("there are no images")
    media_io_kwargs: Any = ignored("there are no images")
    prompt_embeds: Any = refused("send the text or its token ids")
    adapters: Any = refused("load it with the model")


class OtherServersFields(RequestBody):
    """Fields of other servers' APIs that clients send by mistake, because they know another name
    for the same thing.
    """

    origin: ClassVar[str] = "other servers"
    num_predict: Any = refused("use max_tokens")
    max_new_tokens: Any = refused("use max_tokens")
    max_length: Any = refused("use max_tokens")
    format: Any = refused("use response_format")
    options: Any = refused("send its fields beside the others")
    do_sample: Any = refused("use temperature", True)
    num_beams: Any = refused("use beams", 1)
    num_return_sequences: Any = refused("use n", 1)


class GenerationBody(
    OtherServersFields, VllmFields, LlamaServerFields, LlmcliFields, SamplingFields
):
    """The fields that all generating APIs share."""

    origin: ClassVar[str] = "OpenAI"
    model: str | None = honored("any name; the answer names the model that is served")
    stream: bool | None = honored("send the answer while it is generated")
    user: Any = ignored("nothing is stored about users")


GENERATION_NAMES = frozenset(
    name for name, effect in GenerationBody.effects().items() if effect.effect == "honored"
)


def shared_values(document: Mapping[str, Any], body_type: type[RequestBody]) -> dict[str, Any]:
    """Return the fields of a request that all generating APIs share and that its model `body_type`
    honors, to copy them to a request of another API.
    """
    effects = body_type.effects()
    return {
        name: value
        for name, value in document.items()
        if name in GENERATION_NAMES and effects[name].effect == "honored"
    }
