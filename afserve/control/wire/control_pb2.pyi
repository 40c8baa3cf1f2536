from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromAttention(_message.Message):
    __slots__ = ("attend", "tokens", "refused", "claimed", "given", "prefixes", "kept_cache")
    ATTEND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    KEPT_CACHE_FIELD_NUMBER: _ClassVar[int]
    attend: Attend
    tokens: Tokens
    refused: Refused
    claimed: Claimed
    given: Given
    prefixes: Prefixes
    kept_cache: KeptCache
    def __init__(self, attend: _Optional[_Union[Attend, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., claimed: _Optional[_Union[Claimed, _Mapping]] = ..., given: _Optional[_Union[Given, _Mapping]] = ..., prefixes: _Optional[_Union[Prefixes, _Mapping]] = ..., kept_cache: _Optional[_Union[KeptCache, _Mapping]] = ...) -> None: ...

class ToAttention(_message.Message):
    __slots__ = ("submit", "cancel", "acknowledge", "resume", "halt", "claim", "ask_cache")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    ASK_CACHE_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    acknowledge: Acknowledge
    resume: Resume
    halt: Halt
    claim: Claim
    ask_cache: AskCache
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., halt: _Optional[_Union[Halt, _Mapping]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., ask_cache: _Optional[_Union[AskCache, _Mapping]] = ...) -> None: ...

class FromNode(_message.Message):
    __slots__ = ("register", "endpoint", "progress", "ready", "heartbeat", "query", "drained", "failed", "filled", "adopted", "routed", "identity", "stuck", "unheard", "noted", "recorded", "traced", "unfilled", "load")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STUCK_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    NOTED_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    UNFILLED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    register: Register
    endpoint: Endpoint
    progress: Progress
    ready: Ready
    heartbeat: Heartbeat
    query: Query
    drained: Drained
    failed: Failed
    filled: Filled
    adopted: Adopted
    routed: Routed
    identity: Identity
    stuck: Stuck
    unheard: Unheard
    noted: Noted
    recorded: Recorded
    traced: Traced
    unfilled: Unfilled
    load: GatewayLoad
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., filled: _Optional[_Union[Filled, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., routed: _Optional[_Union[Routed, _Mapping]] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., stuck: _Optional[_Union[Stuck, _Mapping]] = ..., unheard: _Optional[_Union[Unheard, _Mapping]] = ..., noted: _Optional[_Union[Noted, _Mapping]] = ..., recorded: _Optional[_Union[Recorded, _Mapping]] = ..., traced: _Optional[_Union[Traced, _Mapping]] = ..., unfilled: _Optional[_Union[Unfilled, _Mapping]] = ..., load: _Optional[_Union[GatewayLoad, _Mapping]] = ...) -> None: ...

class ToNode(_message.Message):
    __slots__ = ("assigned", "peers", "gateways", "query_answer", "serve", "attention_nodes", "drain", "shutdown", "fill_slots", "adopt", "retire", "record")
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    QUERY_ANSWER_FIELD_NUMBER: _ClassVar[int]
    SERVE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_NODES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    FILL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    assigned: Assigned
    peers: Peers
    gateways: Gateways
    query_answer: QueryAnswer
    serve: Serve
    attention_nodes: AttentionNodes
    drain: Drain
    shutdown: Shutdown
    fill_slots: FillSlots
    adopt: Adopt
    retire: Retire
    record: Record
    def __init__(self, assigned: _Optional[_Union[Assigned, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., gateways: _Optional[_Union[Gateways, _Mapping]] = ..., query_answer: _Optional[_Union[QueryAnswer, _Mapping]] = ..., serve: _Optional[_Union[Serve, _Mapping]] = ..., attention_nodes: _Optional[_Union[AttentionNodes, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., fill_slots: _Optional[_Union[FillSlots, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., retire: _Optional[_Union[Retire, _Mapping]] = ..., record: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("protocol", "version", "role", "index", "pid", "host", "standing")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    role: str
    index: int
    pid: int
    host: str
    standing: Standing
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., role: _Optional[str] = ..., index: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("generation", "stage", "resident_bytes", "endpoint", "identity", "newest", "held", "asked", "isa")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    generation: int
    stage: str
    resident_bytes: int
    endpoint: Endpoint
    identity: Identity
    newest: int
    held: _containers.RepeatedScalarFieldContainer[bytes]
    asked: _containers.RepeatedScalarFieldContainer[bytes]
    isa: str
    def __init__(self, generation: _Optional[int] = ..., stage: _Optional[str] = ..., resident_bytes: _Optional[int] = ..., endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., newest: _Optional[int] = ..., held: _Optional[_Iterable[bytes]] = ..., asked: _Optional[_Iterable[bytes]] = ..., isa: _Optional[str] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("address", "agreed")
    class AgreedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    address: str
    agreed: _containers.ScalarMap[str, str]
    def __init__(self, address: _Optional[str] = ..., agreed: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("things",)
    class ThingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    THINGS_FIELD_NUMBER: _ClassVar[int]
    things: _containers.ScalarMap[str, str]
    def __init__(self, things: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Stuck(_message.Message):
    __slots__ = ("index", "generation", "seconds", "unreachable")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    index: int
    generation: int
    seconds: float
    unreachable: bool
    def __init__(self, index: _Optional[int] = ..., generation: _Optional[int] = ..., seconds: _Optional[float] = ..., unreachable: _Optional[bool] = ...) -> None: ...

class Unheard(_message.Message):
    __slots__ = ("index", "generation", "seconds")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    generation: int
    seconds: float
    def __init__(self, index: _Optional[int] = ..., generation: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Noted(_message.Message):
    __slots__ = ("text", "warning")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    text: str
    warning: bool
    def __init__(self, text: _Optional[str] = ..., warning: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("fraction", "what")
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    fraction: float
    what: str
    def __init__(self, fraction: _Optional[float] = ..., what: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("resident_bytes", "expert_error", "dense_error", "isa")
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ERROR_FIELD_NUMBER: _ClassVar[int]
    DENSE_ERROR_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    resident_bytes: int
    expert_error: float
    dense_error: float
    isa: str
    def __init__(self, resident_bytes: _Optional[int] = ..., expert_error: _Optional[float] = ..., dense_error: _Optional[float] = ..., isa: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("resident_bytes", "attention", "expert")
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    resident_bytes: int
    attention: Counts
    expert: Counts
    def __init__(self, resident_bytes: _Optional[int] = ..., attention: _Optional[_Union[Counts, _Mapping]] = ..., expert: _Optional[_Union[Counts, _Mapping]] = ...) -> None: ...

class Routed(_message.Message):
    __slots__ = ("layers", "experts", "width", "prefill", "decode")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    experts: int
    width: int
    prefill: bytes
    decode: bytes
    def __init__(self, layers: _Optional[int] = ..., experts: _Optional[int] = ..., width: _Optional[int] = ..., prefill: _Optional[bytes] = ..., decode: _Optional[bytes] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("declared", "whole", "real")
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    declared: int
    whole: _containers.RepeatedScalarFieldContainer[int]
    real: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, declared: _Optional[int] = ..., whole: _Optional[_Iterable[int]] = ..., real: _Optional[_Iterable[float]] = ...) -> None: ...

class GatewayLoad(_message.Message):
    __slots__ = ("total", "classes")
    class ClassesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Counts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Counts, _Mapping]] = ...) -> None: ...
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    total: Counts
    classes: _containers.MessageMap[str, Counts]
    def __init__(self, total: _Optional[_Union[Counts, _Mapping]] = ..., classes: _Optional[_Mapping[str, Counts]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request", "count", "token", "extra")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    request: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    extra: _containers.RepeatedCompositeFieldContainer[Extra]
    def __init__(self, request: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., extra: _Optional[_Iterable[_Union[Extra, _Mapping]]] = ...) -> None: ...

class Extra(_message.Message):
    __slots__ = ("event", "finish_reason", "stop_token_id", "cached_tokens", "error", "logprobs", "prompt_logprobs", "queued", "pooled", "accepted", "rejected", "routed", "from_peer", "from_host", "from_disk")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    FROM_HOST_FIELD_NUMBER: _ClassVar[int]
    FROM_DISK_FIELD_NUMBER: _ClassVar[int]
    event: int
    finish_reason: str
    stop_token_id: int
    cached_tokens: int
    error: str
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    queued: float
    pooled: bytes
    accepted: int
    rejected: int
    routed: RoutedExperts
    from_peer: int
    from_host: int
    from_disk: int
    def __init__(self, event: _Optional[int] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., error: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ..., queued: _Optional[float] = ..., pooled: _Optional[bytes] = ..., accepted: _Optional[int] = ..., rejected: _Optional[int] = ..., routed: _Optional[_Union[RoutedExperts, _Mapping]] = ..., from_peer: _Optional[int] = ..., from_host: _Optional[int] = ..., from_disk: _Optional[int] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("layers", "top_k", "width", "data")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    layers: int
    top_k: int
    width: int
    data: bytes
    def __init__(self, layers: _Optional[int] = ..., top_k: _Optional[int] = ..., width: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("known", "token_id", "logprob", "rank", "top_token", "top_logprob")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    known: bool
    token_id: int
    logprob: float
    rank: int
    top_token: _containers.RepeatedScalarFieldContainer[int]
    top_logprob: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, known: _Optional[bool] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token: _Optional[_Iterable[int]] = ..., top_logprob: _Optional[_Iterable[float]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request", "error")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request: int
    error: Error
    def __init__(self, request: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failed(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: Error
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "message", "param", "retry_after")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    param: str
    retry_after: float
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retry_after: _Optional[float] = ...) -> None: ...

class Assigned(_message.Message):
    __slots__ = ("role", "index", "generation", "counts", "source", "engine", "fingerprint", "transport", "trace_folder", "verify", "silence", "most_attention", "log_level", "log_format", "otlp_endpoint", "trace_sent", "phases", "placement")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PhasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FOLDER_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    MOST_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOG_FORMAT_FIELD_NUMBER: _ClassVar[int]
    OTLP_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TRACE_SENT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    index: int
    generation: int
    counts: _containers.ScalarMap[str, int]
    source: ModelSource
    engine: EngineConfig
    fingerprint: str
    transport: str
    trace_folder: str
    verify: str
    silence: float
    most_attention: int
    log_level: str
    log_format: str
    otlp_endpoint: str
    trace_sent: bool
    phases: _containers.ScalarMap[int, str]
    placement: SaidPlacement
    def __init__(self, role: _Optional[str] = ..., index: _Optional[int] = ..., generation: _Optional[int] = ..., counts: _Optional[_Mapping[str, int]] = ..., source: _Optional[_Union[ModelSource, _Mapping]] = ..., engine: _Optional[_Union[EngineConfig, _Mapping]] = ..., fingerprint: _Optional[str] = ..., transport: _Optional[str] = ..., trace_folder: _Optional[str] = ..., verify: _Optional[str] = ..., silence: _Optional[float] = ..., most_attention: _Optional[int] = ..., log_level: _Optional[str] = ..., log_format: _Optional[str] = ..., otlp_endpoint: _Optional[str] = ..., trace_sent: _Optional[bool] = ..., phases: _Optional[_Mapping[int, str]] = ..., placement: _Optional[_Union[SaidPlacement, _Mapping]] = ...) -> None: ...

class SaidPlacement(_message.Message):
    __slots__ = ("data", "base")
    DATA_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    base: int
    def __init__(self, data: _Optional[bytes] = ..., base: _Optional[int] = ...) -> None: ...

class ModelSource(_message.Message):
    __slots__ = ("path", "name", "dtype", "load_format", "layers", "seed")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FORMAT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    path: str
    name: str
    dtype: str
    load_format: str
    layers: int
    seed: int
    def __init__(self, path: _Optional[str] = ..., name: _Optional[str] = ..., dtype: _Optional[str] = ..., load_format: _Optional[str] = ..., layers: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class EngineConfig(_message.Message):
    __slots__ = ("settings",)
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Scalar
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Scalar, _Mapping]] = ...) -> None: ...
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.MessageMap[str, Scalar]
    def __init__(self, settings: _Optional[_Mapping[str, Scalar]] = ...) -> None: ...

class Scalar(_message.Message):
    __slots__ = ("flag", "whole", "real", "text")
    FLAG_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    flag: bool
    whole: int
    real: float
    text: str
    def __init__(self, flag: _Optional[bool] = ..., whole: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class Gateways(_message.Message):
    __slots__ = ("gateways",)
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayAddress]
    def __init__(self, gateways: _Optional[_Iterable[_Union[GatewayAddress, _Mapping]]] = ...) -> None: ...

class GatewayAddress(_message.Message):
    __slots__ = ("index", "address")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class AttentionNodes(_message.Message):
    __slots__ = ("nodes", "refusing", "serves")
    NODES_FIELD_NUMBER: _ClassVar[int]
    REFUSING_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[AttentionPeer]
    refusing: str
    serves: bool
    def __init__(self, nodes: _Optional[_Iterable[_Union[AttentionPeer, _Mapping]]] = ..., refusing: _Optional[str] = ..., serves: _Optional[bool] = ...) -> None: ...

class AttentionPeer(_message.Message):
    __slots__ = ("index", "generation", "accepting", "address", "phase")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTING_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    index: int
    generation: int
    accepting: bool
    address: str
    phase: str
    def __init__(self, index: _Optional[int] = ..., generation: _Optional[int] = ..., accepting: _Optional[bool] = ..., address: _Optional[str] = ..., phase: _Optional[str] = ...) -> None: ...

class Attend(_message.Message):
    __slots__ = ("index", "generation", "held", "stream")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    index: int
    generation: int
    held: _containers.RepeatedCompositeFieldContainer[Held]
    stream: int
    def __init__(self, index: _Optional[int] = ..., generation: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., stream: _Optional[int] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("request", "count", "kept")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    request: int
    count: int
    kept: bool
    def __init__(self, request: _Optional[int] = ..., count: _Optional[int] = ..., kept: _Optional[bool] = ...) -> None: ...

class AskCache(_message.Message):
    __slots__ = ("query", "owner", "everybody", "unpin", "prompt", "salt")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EVERYBODY_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    query: int
    owner: str
    everybody: bool
    unpin: bool
    prompt: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    def __init__(self, query: _Optional[int] = ..., owner: _Optional[str] = ..., everybody: _Optional[bool] = ..., unpin: _Optional[bool] = ..., prompt: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ...) -> None: ...

class Owned(_message.Message):
    __slots__ = ("owner", "blocks", "seconds")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    blocks: int
    seconds: float
    def __init__(self, owner: _Optional[str] = ..., blocks: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class KeptCache(_message.Message):
    __slots__ = ("query", "blocks", "block_tokens", "block_bytes", "unpinned", "owners")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    query: int
    blocks: int
    block_tokens: int
    block_bytes: int
    unpinned: int
    owners: _containers.RepeatedCompositeFieldContainer[Owned]
    def __init__(self, query: _Optional[int] = ..., blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., unpinned: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[Owned, _Mapping]]] = ...) -> None: ...

class Prefixes(_message.Message):
    __slots__ = ("came", "went", "anew")
    CAME_FIELD_NUMBER: _ClassVar[int]
    WENT_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    came: _containers.RepeatedScalarFieldContainer[int]
    went: _containers.RepeatedScalarFieldContainer[int]
    anew: bool
    def __init__(self, came: _Optional[_Iterable[int]] = ..., went: _Optional[_Iterable[int]] = ..., anew: _Optional[bool] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("request", "start")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    request: int
    start: int
    def __init__(self, request: _Optional[int] = ..., start: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class Serve(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Query(_message.Message):
    __slots__ = ("number", "what", "body")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    number: int
    what: str
    body: bytes
    def __init__(self, number: _Optional[int] = ..., what: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("epoch", "nodes", "picked", "balance", "decisions", "moves", "layers", "routed", "incidents", "lost", "reloaded_bytes", "resent_rows", "stalled", "wanted", "absent", "pilot")
    class PickedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class StalledEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class WantedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PICKED_FIELD_NUMBER: _ClassVar[int]
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    RELOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESENT_ROWS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    PILOT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeView]
    picked: _containers.ScalarMap[str, str]
    balance: _containers.RepeatedScalarFieldContainer[float]
    decisions: _containers.RepeatedScalarFieldContainer[str]
    moves: int
    layers: int
    routed: _containers.RepeatedScalarFieldContainer[int]
    incidents: _containers.RepeatedCompositeFieldContainer[IncidentView]
    lost: _containers.RepeatedCompositeFieldContainer[LostNodes]
    reloaded_bytes: int
    resent_rows: int
    stalled: _containers.ScalarMap[str, float]
    wanted: _containers.ScalarMap[str, int]
    absent: _containers.RepeatedScalarFieldContainer[str]
    pilot: PilotView
    def __init__(self, epoch: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeView, _Mapping]]] = ..., picked: _Optional[_Mapping[str, str]] = ..., balance: _Optional[_Iterable[float]] = ..., decisions: _Optional[_Iterable[str]] = ..., moves: _Optional[int] = ..., layers: _Optional[int] = ..., routed: _Optional[_Iterable[int]] = ..., incidents: _Optional[_Iterable[_Union[IncidentView, _Mapping]]] = ..., lost: _Optional[_Iterable[_Union[LostNodes, _Mapping]]] = ..., reloaded_bytes: _Optional[int] = ..., resent_rows: _Optional[int] = ..., stalled: _Optional[_Mapping[str, float]] = ..., wanted: _Optional[_Mapping[str, int]] = ..., absent: _Optional[_Iterable[str]] = ..., pilot: _Optional[_Union[PilotView, _Mapping]] = ...) -> None: ...

class PilotView(_message.Message):
    __slots__ = ("mode", "advices", "outcomes", "advised", "counts", "figures")
    class AdvisedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    ADVICES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    ADVISED_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    mode: str
    advices: _containers.RepeatedScalarFieldContainer[str]
    outcomes: _containers.RepeatedScalarFieldContainer[str]
    advised: _containers.ScalarMap[str, int]
    counts: _containers.ScalarMap[str, int]
    figures: _containers.ScalarMap[str, float]
    def __init__(self, mode: _Optional[str] = ..., advices: _Optional[_Iterable[str]] = ..., outcomes: _Optional[_Iterable[str]] = ..., advised: _Optional[_Mapping[str, int]] = ..., counts: _Optional[_Mapping[str, int]] = ..., figures: _Optional[_Mapping[str, float]] = ...) -> None: ...

class IncidentView(_message.Message):
    __slots__ = ("at", "what", "node", "generation", "cause", "why", "did", "seconds", "stall", "role")
    AT_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    DID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    at: float
    what: str
    node: str
    generation: int
    cause: str
    why: str
    did: str
    seconds: float
    stall: float
    role: str
    def __init__(self, at: _Optional[float] = ..., what: _Optional[str] = ..., node: _Optional[str] = ..., generation: _Optional[int] = ..., cause: _Optional[str] = ..., why: _Optional[str] = ..., did: _Optional[str] = ..., seconds: _Optional[float] = ..., stall: _Optional[float] = ..., role: _Optional[str] = ...) -> None: ...

class LostNodes(_message.Message):
    __slots__ = ("role", "cause", "count")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    role: str
    cause: str
    count: int
    def __init__(self, role: _Optional[str] = ..., cause: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class NodeView(_message.Message):
    __slots__ = ("name", "role", "state", "pid", "heartbeat_age", "resident_bytes", "attention", "expert", "phase", "isa")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    state: str
    pid: int
    heartbeat_age: float
    resident_bytes: int
    attention: Counts
    expert: Counts
    phase: str
    isa: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., heartbeat_age: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., attention: _Optional[_Union[Counts, _Mapping]] = ..., expert: _Optional[_Union[Counts, _Mapping]] = ..., phase: _Optional[str] = ..., isa: _Optional[str] = ...) -> None: ...

class QueryAnswer(_message.Message):
    __slots__ = ("number", "body", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    body: bytes
    error: Error
    def __init__(self, number: _Optional[int] = ..., body: _Optional[bytes] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("number", "seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    seconds: float
    def __init__(self, number: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Recorded(_message.Message):
    __slots__ = ("number", "data")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    data: bytes
    def __init__(self, number: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Traced(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Recordings(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, data: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("experts",)
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedCompositeFieldContainer[ExpertAddress]
    def __init__(self, experts: _Optional[_Iterable[_Union[ExpertAddress, _Mapping]]] = ...) -> None: ...

class ExpertAddress(_message.Message):
    __slots__ = ("index", "address", "generation")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    generation: int
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "prompt", "sampling", "generated", "kv_from", "priority", "cache_salt", "keep", "origin", "tenant", "prediction", "retain", "tiles")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    KV_FROM_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    TILES_FIELD_NUMBER: _ClassVar[int]
    request: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    generated: _containers.RepeatedScalarFieldContainer[int]
    kv_from: KvSource
    priority: int
    cache_salt: str
    keep: Keep
    origin: Origin
    tenant: Tenant
    prediction: _containers.RepeatedScalarFieldContainer[int]
    retain: float
    tiles: bytes
    def __init__(self, request: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., generated: _Optional[_Iterable[int]] = ..., kv_from: _Optional[_Union[KvSource, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ..., tenant: _Optional[_Union[Tenant, _Mapping]] = ..., prediction: _Optional[_Iterable[int]] = ..., retain: _Optional[float] = ..., tiles: _Optional[bytes] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "share")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    share: int
    def __init__(self, name: _Optional[str] = ..., share: _Optional[int] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("request_id", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("index", "generation", "request", "address", "prefills", "within", "helpers")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    HELPERS_FIELD_NUMBER: _ClassVar[int]
    index: int
    generation: int
    request: int
    address: str
    prefills: bool
    within: float
    helpers: _containers.RepeatedCompositeFieldContainer[KvHelper]
    def __init__(self, index: _Optional[int] = ..., generation: _Optional[int] = ..., request: _Optional[int] = ..., address: _Optional[str] = ..., prefills: _Optional[bool] = ..., within: _Optional[float] = ..., helpers: _Optional[_Iterable[_Union[KvHelper, _Mapping]]] = ...) -> None: ...

class KvHelper(_message.Message):
    __slots__ = ("generation", "address")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    address: str
    def __init__(self, generation: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("id", "choice", "choices", "seconds", "about")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    id: str
    choice: int
    choices: int
    seconds: float
    about: bytes
    def __init__(self, id: _Optional[str] = ..., choice: _Optional[int] = ..., choices: _Optional[int] = ..., seconds: _Optional[float] = ..., about: _Optional[bytes] = ...) -> None: ...

class Halt(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("query", "id", "take")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    query: int
    id: str
    take: bool
    def __init__(self, query: _Optional[int] = ..., id: _Optional[str] = ..., take: _Optional[bool] = ...) -> None: ...

class KeptAnswer(_message.Message):
    __slots__ = ("request", "prompt_ids", "count", "bare", "keep", "ended", "unheard")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BARE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    request: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    count: int
    bare: int
    keep: Keep
    ended: bool
    unheard: int
    def __init__(self, request: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., count: _Optional[int] = ..., bare: _Optional[int] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., ended: _Optional[bool] = ..., unheard: _Optional[int] = ...) -> None: ...

class Claimed(_message.Message):
    __slots__ = ("query", "answers")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    query: int
    answers: _containers.RepeatedCompositeFieldContainer[KeptAnswer]
    def __init__(self, query: _Optional[int] = ..., answers: _Optional[_Iterable[_Union[KeptAnswer, _Mapping]]] = ...) -> None: ...

class Given(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop_token_ids", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "bias_token", "bias_value", "grammar", "pooled", "draft", "return_routed_experts")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    bias_token: _containers.RepeatedScalarFieldContainer[int]
    bias_value: _containers.RepeatedScalarFieldContainer[float]
    grammar: str
    pooled: bool
    draft: int
    return_routed_experts: bool
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., bias_token: _Optional[_Iterable[int]] = ..., bias_value: _Optional[_Iterable[float]] = ..., grammar: _Optional[str] = ..., pooled: _Optional[bool] = ..., draft: _Optional[int] = ..., return_routed_experts: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request", "parts")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    request: int
    parts: bool
    def __init__(self, request: _Optional[int] = ..., parts: _Optional[bool] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("ends",)
    ENDS_FIELD_NUMBER: _ClassVar[int]
    ends: bool
    def __init__(self, ends: _Optional[bool] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: Error
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class FillSlots(_message.Message):
    __slots__ = ("urgent", "placement")
    URGENT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    urgent: bool
    placement: SaidPlacement
    def __init__(self, urgent: _Optional[bool] = ..., placement: _Optional[_Union[SaidPlacement, _Mapping]] = ...) -> None: ...

class Filled(_message.Message):
    __slots__ = ("epoch", "experts", "bytes", "seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    experts: int
    bytes: int
    seconds: float
    def __init__(self, epoch: _Optional[int] = ..., experts: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Unfilled(_message.Message):
    __slots__ = ("epoch", "layer", "expert", "why")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layer: _containers.RepeatedScalarFieldContainer[int]
    expert: _containers.RepeatedScalarFieldContainer[int]
    why: str
    def __init__(self, epoch: _Optional[int] = ..., layer: _Optional[_Iterable[int]] = ..., expert: _Optional[_Iterable[int]] = ..., why: _Optional[str] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("placement",)
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    placement: SaidPlacement
    def __init__(self, placement: _Optional[_Union[SaidPlacement, _Mapping]] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Retire(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...
