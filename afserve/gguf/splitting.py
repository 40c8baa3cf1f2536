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
_ALPHABETS = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇ"
    "ℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_ALPHABETS}",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
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
