"""How texts are split before byte pairs are merged: the rules that `tokenizer.ggml.pre` names.

Expressions are those of the models' own tokenizer.json, which llama.cpp's (llm_tokenizer_bpe in llama-vocab.cpp) stand
for; several are applied one after the other.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BY_THREE = rf"{_SHORTENED}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_BY_ONE = rf"{_SHORTENED}|{_LETTERS}|\p{{N}}|{_REST}"
_MARKED = r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORTENED}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORTENED}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ALPHABETS = """
41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c
38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b
1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4
1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113
2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b
2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06
fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df
1e900-1e943
"""  # of cased letters, as DeepSeek's tokenizer lists them: first and last of each range


def _any_of(ranges: str) -> str:
    """A class of characters from hexadecimal numbers."""
    ends = (each.split("-") for each in ranges.split())
    return "[" + "".join("-".join(chr(int(end, 16)) for end in each) for each in ends) + "]"


_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_any_of(_ALPHABETS)}+",
    rf"\s?{_any_of('21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002')}+",
    r"\s+$",
    f"{_any_of('800-9fa5 ac00-d7ff')}+",
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    f"{_any_of('4e00-9fa5 3040-309f 30a0-30ff')}+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """`whole`: a piece that is a token is one, whatever merges say. `composed`: texts are brought to Unicode's composed
    form (NFC) first. `begins`: a text begins with the bos token where the file does not say."""

    expressions: tuple[str, ...]
    whole: bool = False
    composed: bool = False
    begins: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in self.expressions]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composed else None


_ROWS = {
    Splitting((_GPT2,)): ("gpt-2", "olmo", "mpt", "phi-2", "exaone4"),
    Splitting((_BY_THREE,), whole=True, begins=True): ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2"),
    Splitting((_BY_THREE,), whole=True): ("glm4", "glm5"),
    Splitting((_BY_THREE,)): ("chatglm-bpe", "dbrx", "smaug-bpe"),
    Splitting((_BY_ONE,), composed=True): ("qwen2", "deepseek-r1-qwen", "megrez"),
    Splitting((_BY_ONE,)): ("stablelm2", "hunyuan", "solar-open"),
    Splitting((rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?{_MARKED}",), composed=True): ("qwen35",),
    Splitting((_CASED,)): ("gpt-4o", "llama4", "minimax-m2"),
    Splitting((_TEKKEN,), whole=True): ("tekken",),
    Splitting((r"\p{N}", _GPT2)): ("starcoder", "refact", "command-r", "smollm", "exaone", "mellum2"),
    Splitting(_DEEPSEEK_LLM): ("deepseek-llm",),
    Splitting(_DEEPSEEK_V3): ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
}
SPLITTINGS: dict[str, Splitting] = {name: rule for rule, names in _ROWS.items() for name in names}
