"""vLLM's `--speculative-config` by its own words, as a `DraftChoice`. No torch.

Every key that vLLM knows is read. What changes nothing here is passed over and named; what asks for something that is
not done is refused.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NoReturn

from afserve.config_ranges import Range
from afserve.drafts import (
    BESIDE,
    DRAFT_TOKENS,
    HEAD,
    DraftChoice,
    DraftMethod,
    NgramOptions,
    SuffixOptions,
)
from afserve.errors import ConfigError, shown
from afserve.json_file import read_setting

FLAG = "--speculative-config"
MOST_CHARACTERS = 1 << 14
_PARAM = "speculative_config"
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'

_OF_A_FOLDER = {one.vllm: method for method, one in BESIDE.items()}
_METHODS: Mapping[str, DraftMethod] = {
    "ngram": DraftMethod.NGRAM,
    "[ngram]": DraftMethod.NGRAM,
    "ngram_gpu": DraftMethod.NGRAM,
    "suffix": DraftMethod.SUFFIX,
    "mtp": DraftMethod.MTP,
    **_OF_A_FOLDER,
}
_SERVED = ("ngram", "suffix", "mtp", *_OF_A_FOLDER)
_HEADS = [name for name, method in _OF_A_FOLDER.items() if BESIDE[method].what == HEAD]
_NOT_DONE: Mapping[str, str] = {
    **dict.fromkeys(
        ("eagle", "medusa", "mlp_speculator"),
        f"of heads beside the model those of {', '.join(_HEADS)} are run",
    ),
    "custom_class": "no code is loaded",
    "extract_hidden_states": "hidden states are not given away",
}
_SYNTHETIC, _LENGTH, _RATES = "synthetic", "synthetic_acceptance_length", "synthetic_acceptance_rates"

_COUNT = Range(1, 1 << 20)
_RUN, _SHORTEST = Range(1, 16), 2  # tokens that are looked for
_READ = (
    *("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    *("rejection_sample_method", _LENGTH, _RATES),
)
_WITHOUT_EFFECT = (
    *("enforce_eager", "draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "moe_backend"),
    *("attention_backend", "kv_cache_dtype", "max_model_len", "revision", "code_revision"),
    *("index_share_for_mtp_iteration", "disable_padded_drafter_batch", "disable_eagle_block_drop"),
    *("use_local_argmax_reduction", "use_heterogeneous_vocab", "parallel_drafting", "draft_sample_method"),
    *("num_speculative_tokens_per_batch_size", "disable_by_batch_size", "enable_adaptive_verification"),
    *("disable_logprobs", "disable_log_stats", "acceptance_method", "speculative_token_tree"),
    *("dspark_draft_topk", "draft_load_config"),
)


def choice_of(text: str) -> DraftChoice:
    """Raises ConfigError that names the key, its value, and what it may be."""
    keys = _Keys(read_setting(text, FLAG, (*_READ, *_WITHOUT_EFFECT), MOST_CHARACTERS, _EXAMPLE))
    method = _method(keys)
    tokens = keys.whole("num_speculative_tokens", _COUNT)
    if tokens is not None and not DRAFT_TOKENS.holds(tokens):
        tokens = int(DRAFT_TOKENS.high)
        keys.passed.append(f"num_speculative_tokens beyond {tokens}")
    synthetic = _synthetic(keys, tokens)
    ngram, suffix = _ngram(keys), _suffix(keys)
    for prefix, own in (("prompt_lookup", DraftMethod.NGRAM), ("suffix_decoding", DraftMethod.SUFFIX)):
        keys.passed += [name for name in keys.given if name.startswith(prefix) and method is not own]
    keys.passed += [name for name in keys.given if name in _WITHOUT_EFFECT and keys.given[name] is not False]
    passed = tuple(dict.fromkeys(keys.passed))
    folder = (keys.text("model") or "") if method in BESIDE else ""
    return DraftChoice(method, tokens, ngram, suffix, synthetic, passed, folder)


def refuse(why: str) -> NoReturn:
    raise ConfigError(f"{FLAG}: {why}", param=_PARAM)


class _Keys:
    """Those that are there; `passed` are the ones without effect."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self.given = given
        self.passed: list[str] = []

    def whole(self, name: str, allowed: Range) -> int | None:
        value = self.given.get(name)
        if value is not None and not allowed.holds(value):
            refuse(f"{name}: {shown(value)} is not {allowed}")
        return value  # type: ignore[return-value]  # the range holds whole numbers only

    def real(self, name: str, low: float, high: float) -> float | None:
        value = self.given.get(name)
        allowed = Range(low, high, whole=False)
        if value is not None and not allowed.holds(value):
            refuse(f"{name}: {shown(value)} is not {allowed}")
        return value  # type: ignore[return-value]

    def text(self, name: str) -> str | None:
        value = self.given.get(name)
        if value is not None and not isinstance(value, str):
            refuse(f"{name}: {shown(value)} is not a text")
        return value


def _synthetic(keys: _Keys, tokens: int | None) -> tuple[float, ...]:
    """As vLLM has them: the mean length is reached with the least variance."""
    length, rates = keys.given.get(_LENGTH), keys.given.get(_RATES)
    method = keys.text("rejection_sample_method")
    if method not in (None, "standard", "strict", "block", _SYNTHETIC):
        refuse(f"rejection_sample_method: {shown(method)} is none of standard, block, synthetic")
    if method != _SYNTHETIC:
        if length is not None or rates is not None:
            refuse(f"{_RATES if length is None else _LENGTH} needs rejection_sample_method: synthetic")
        return ()
    if tokens is None or (length is None) == (rates is None):
        refuse(
            f"rejection_sample_method: synthetic needs num_speculative_tokens and one of {_LENGTH}, {_RATES}"
        )
    if length is not None:
        mean = keys.real(_LENGTH, 1, tokens + 1) or 1.0
        return tuple(min(1.0, max(0.0, mean - 1 - position)) for position in range(tokens))
    chance = Range(0, 1, whole=False)
    if not isinstance(rates, list) or not all(map(chance.holds, rates)):
        refuse(f"{_RATES}: {shown(rates)} is not a list of numbers in [0, 1]")
    if len(rates) != tokens:
        most = int(DRAFT_TOKENS.high)
        refuse(
            f"{_RATES} has {len(rates)} numbers, and {tokens} tokens are drafted; give one for each of "
            f"num_speculative_tokens, which is {most} at most here"
        )
    if any(later > sooner for sooner, later in pairwise(rates)):
        refuse(f"{_RATES}: {shown(rates)} rises: a token counts only where those before it are right")
    return tuple(rates)


def _method(keys: _Keys) -> DraftMethod:
    name, model = keys.text("method"), keys.text("model")
    if model in _METHODS and name in (None, model):
        name = model
    elif name in _OF_A_FOLDER:
        if not model:
            refuse(f'method "{name}" needs model: the folder of the {BESIDE[_OF_A_FOLDER[name]].what}')
    elif model is not None and _predicts(name):
        keys.passed.append("model")  # its layer is the served checkpoint's own
    elif model and name is None:
        name = "draft_model"
    elif model is not None and name in _METHODS:
        refuse(
            f"model: {shown(model)}: method {name} reads none, those with a folder are {', '.join(_OF_A_FOLDER)}"
        )
    if name is None:
        refuse(f"method is missing; it is one of {', '.join(_SERVED)}")
    if name in _METHODS:
        return _METHODS[name]
    if _predicts(name):
        return DraftMethod.MTP
    known = f"the methods here are {', '.join(_SERVED)}"
    why = _NOT_DONE.get(name)
    if why is None:
        refuse(f"method: {shown(name)} is none of vLLM's; {known}")
    return refuse(f"method {shown(name)}: {why}; {known}")


def _predicts(name: str | None) -> bool:
    """deepseek_mtp and others of that end are mtp in vLLM, too."""
    return name is not None and (name == DraftMethod.MTP or name.endswith("_mtp"))


def _ngram(keys: _Keys) -> NgramOptions:
    """As vLLM has it: the one that is missing is the other."""
    longest, shortest = keys.whole("prompt_lookup_max", _RUN), keys.whole("prompt_lookup_min", _RUN)
    if longest is None and shortest is None:
        return NgramOptions()
    low, high = shortest or longest or 0, longest or shortest or 0
    if low > high:
        refuse(f"prompt_lookup_min: {low} is more than prompt_lookup_max, {high}")
    if low < _SHORTEST:
        keys.passed.append(f"a run of fewer than {_SHORTEST} tokens")
    return NgramOptions(max(low, _SHORTEST), max(high, _SHORTEST))


def _suffix(keys: _Keys) -> SuffixOptions:
    plain = SuffixOptions()
    factor = keys.real("suffix_decoding_max_spec_factor", 0, 64)
    least = keys.real("suffix_decoding_min_token_prob", 0, 1)
    cached = keys.whole("suffix_decoding_max_cached_requests", Range(0, 1 << 30))
    depth = keys.whole("suffix_decoding_max_tree_depth", _COUNT)
    bounded = {"suffix_decoding_max_cached_requests": cached, "suffix_decoding_max_tree_depth": depth}
    keys.passed += [name for name, value in bounded.items() if value]  # what is kept is bounded by tokens
    return SuffixOptions(
        plain.factor if factor is None else factor, plain.least if least is None else least, cached != 0
    )
