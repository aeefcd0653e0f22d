"""The records that the API process and the engine process exchange, and how they travel.

A record is one msgspec struct, MessagePack-encoded, behind a four-byte big-endian length, over a Unix socket pair that
only the two processes hold. Nothing that can carry code (pickle and its kin) is ever read from it.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from longreach.engine.errors import FailureKind
from longreach.engine.looks import Look, Looked
from longreach.engine.rope_choice import RopeTable, contents_key
from longreach.engine.stats import Stats
from longreach.engine.updates import Updates
from longreach.policies.values import DENSE, AttentionPolicy
from longreach.util.log_lines import LogFormat

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size

HEARTBEAT_SECONDS = 0.25

# A colder request is greedy. Logits near 100 are 2**-17 (0.8e-5) apart in float32: at lower temperatures rounding, and
# not the model, would decide which of the likeliest tokens is drawn.
LEAST_TEMPERATURE = 1e-5
# What is told of less likely tokens. JSON has no -inf, and OpenAI's API says -9999.0 for "very unlikely".
LEAST_LOGPROB = -9999.0


class EngineConfig(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What the engine process is told at start; see `longreach.config.Settings` for the meaning and limits of most.

    `revision` is a branch, tag or commit of a hub id; a server's engine gets the commit whose other files the API has
    read. `tokenizer_eos_ids` are the tokens that end
    an answer by the tokenizer's files. `other_tokenizer` names a tokenizer that is not the model's own, and
    `other_tokenizer_ids` is one more than its largest token id. With a `gguf_file` the weights are that file's, and
    `model` is the directory that stands for what it describes.
    """

    model: str
    revision: str | None = None
    hf_overrides: dict[str, Any] = {}
    log_format: LogFormat = "text"
    rope_by_request: bool = False
    gguf_file: str | None = None
    tokenizer_eos_ids: list[int] = []
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int | None = None
    page_size: int = 128
    page_bounds: bool = False
    kv_cache_bytes: int | None = None
    kv_offload_bytes: int = 0
    kv_disk: str | None = None
    kv_disk_bytes: int = 0
    handover: bool = False
    state_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True
    random_weights: bool = False
    max_itl: float = 0.05
    prefix_cache: bool = True
    resume_seconds: float = 60.0
    max_queued_requests: int = 256
    max_queued_tokens: int | None = None
    tokenizer_file: str | None = None
    other_tokenizer: str | None = None
    other_tokenizer_ids: int = 0
    attention_dense_layers: list[int] = []
    silence_timeout: float = 30.0
    step_timeout: float = 600.0
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    batch_invariant: bool = False


class Sampling(msgspec.Struct, frozen=True):
    """How a token is drawn. `top_k` 0 means no limit.

    Penalties and `logit_bias` (by token id) change the logits first and so count at every temperature; a temperature
    below LEAST_TEMPERATURE is greedy and ignores `top_p`, `top_k`, `min_p` and `seed`. If there are any
    `allowed_token_ids`, no other token is drawn, and none that completes one of `bad_words` (token ids) in the answer.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []
    bad_words: list[list[int]] = []

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, which no random number decides."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def penalizes(self) -> bool:
        """Whether what may be drawn depends on how often tokens have occurred."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def looks_back(self) -> bool:
        """Whether what may be drawn depends on the tokens before it."""
        return self.penalizes or any(len(word) > 1 for word in self.bad_words)


class Generate(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request: continue `prompt` (token ids) by at most `max_tokens` tokens.

    Generation ends after a token in `stop_token_ids` (the model's end-of-sequence ids are the caller's to include), but
    those tokens cannot be drawn before `min_tokens` tokens have been. Prompts of a smaller `priority` are read first.
    Only requests of one `cache_salt` share pages. At most `speculate` tokens are drafted a step. With `grammar` (in
    llguidance's form) the answer is a sentence of it. `logprobs` and `prompt_logprobs` ask for the log-probabilities of
    the answer's and the prompt's tokens, with so many of the likeliest at each place. All of its tokens are computed
    under its `attention` policy, and pages are shared only with requests of the same. The prompt of a
    `flexible` request is read after all others, and no step is shortened for its answer. Callers take turns where
    grammars are compiled; `caller` says whose the request is. `drawn` are tokens of its answer that an engine which
    died has told: the answer goes on behind them as that of a preempted request does, and they are not told again.
    Positions are turned by the table of `rope_factor`, one of `Started.rope_tables`; 0 where the engine has none. With
    `places` it is told what of the prompt each token attended to.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    sampling: Sampling = Sampling()
    priority: int = 0
    flexible: bool = False
    cache_salt: str = ""
    speculate: int = 0
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    attention: AttentionPolicy = DENSE
    caller: str = ""
    drawn: list[int] = []
    places: bool = False
    rope_factor: float = 0.0

    @property
    def contents_key(self) -> str:
        """What the contents of its pages depend on beside its tokens and its salt."""
        return contents_key(self.attention, self.rope_factor)


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a request; its pages can be had before the next step is planned. Unknown ids are not an error."""

    request_id: str


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Evict what is cached of a prompt last, until `Unpin`, in place of what this name has pinned before. A prompt is
    known by its token ids, and by the salt, the attention policy and the rotary table of requests that begin so."""

    name: str
    prompt: list[int]
    cache_salt: str = ""
    attention: AttentionPolicy = DENSE
    rope_factor: float = 0.0


class Unpin(msgspec.Struct, frozen=True, tag=True):
    """End a pin; unknown names are not an error."""

    name: str


class Started(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine is ready. Lengths and sizes are in tokens; `max_model_len` is what really fits, prompt and answer.

    `kv_tokens` fit into the KV cache in requests of the longest length; `host_kv_tokens` is what host memory keeps of
    those that are evicted, in `host_bytes`, where copies of states are, too. `page_bytes` is what one page takes, and
    `page_groups` groups of layers have one each. `dense_share` is the share of the full layers that no attention policy
    touches; `page_bounds` says whether the other full layers keep bounds of their keys, as a decode budget needs.
    `quantization` names the formats of quantised weights; `weight_bytes` is what the weights take on one device.
    `state_slots` are for recurrent states, of which one takes `state_bytes`; a running request has two, and the others
    are copies that later ones start from. `digest_namespace` is what the digests of pages depend on beside a request;
    None without a prefix cache. `rope_tables` are the rotary frequencies that requests choose from, shortest first;
    none where there is nothing to choose. `start_phases` are the seconds of the start by what they went to.
    In `attended_layers` layers it can be seen what an answer attends to.
    """

    max_model_len: int
    max_batched_tokens: int
    kv_tokens: int
    page_size: int
    page_bytes: int
    host_kv_tokens: int
    host_bytes: int = 0
    vocab_size: int
    eos_token_ids: list[int]
    model_type: str
    device: str
    dtype: str
    kv_dtype: str
    attention_backend: str
    backend_reason: str
    load_seconds: float
    dense_share: float = 0.0
    page_bounds: bool = False
    quantization: str = ""
    weight_bytes: int = 0
    page_groups: int = 1
    state_slots: int = 0
    state_bytes: int = 0
    digest_namespace: list[str] | None = None
    rope_tables: list[RopeTable] = []
    start_phases: dict[str, float] = {}
    attended_layers: int = 0


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start; `message` is one line for the operator and names the fix where one is known."""

    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The engine lives; sent every `HEARTBEAT_SECONDS`, whatever it computes.

    `step_seconds` is how long the running step has taken so far, 0 between steps; `stats` is as of the last step.
    """

    step_seconds: float
    stats: Stats


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request ends in an error: `invalid` is the caller's fault, `grammar` that of its grammar, `internal` the
    server's."""

    request_id: str
    kind: FailureKind
    message: str


ToEngine = EngineConfig | Generate | Cancel | Look | Pin | Unpin
FromEngine = Started | StartFailed | Updates | Failed | Heartbeat | Looked

to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """One message as it travels: its length in four bytes, then its body."""
    body = _encoder.encode(message)
    return framed(body)


def framed(body: bytes) -> bytes:
    """A body behind its length."""
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """The body's length in bytes, from the four bytes before it."""
    return _LENGTH.unpack(header)[0]
