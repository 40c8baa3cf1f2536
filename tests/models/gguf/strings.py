"""Strings that tokenizers disagree about: scripts of all kinds, marks, code, spaces and line ends, digits, emoji. The
same ones each time."""

import random

_SCRIPTS = (
    (0x20, 0x7E), (0xA1, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x64A), (0x905, 0x939),
    (0xE01, 0xE3A), (0x1100, 0x11FF), (0x2010, 0x2044), (0x20A0, 0x20BF), (0x2190, 0x22FF), (0x3041, 0x30FF),
    (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0xFF01, 0xFF5E), (0x1F300, 0x1F64F), (0x1D400, 0x1D4FF), (0x300, 0x336),
)  # fmt: skip
_SPACES = (
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\t\t",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u200b",
)
_CODE = (
    "def f(x):", "return x+1", "for(int i=0;i<10;i++){", "}", "if (a != b && c >= d)", "std::vector<int> v;",
    "x_y.z[0]",
    "#include <stdio.h>", "print(f\"{a:>10}\")", "// later", "/* é */", "SELECT * FROM t WHERE a='b';",
    "http://a.b/c?d=e&f",
    "let s = `${x}`;", "0x1F", "3.14e-10", "1,234,567", "camelCaseHTTPServer", "__init__", "->", "=>", "!==", "\\n\\t",
    "<div/>",
)  # fmt: skip
_WORDS = (
    "the", "The", "don't", "DON'T", "we'll", "they're", "I'd", "naïve", "Straße", "ŒUVRE", "слово", "日本語",
    "中文字符",
    "한국어", "العربية", "हिन्दी", "ไทย", "e\u0301", "👩\u200d👩\u200d👧", "🇩🇪", "🚀🦙", "½", "①", "2024", "12345", "'s",
)  # fmt: skip
_ENDS = ".,;:!?-_'\"()[]{}#$%&*+/=@^`~|\\"


def strings(count: int, seed: int = 0) -> list[str]:
    """Of up to 40 parts each; some are empty."""
    drawn = random.Random(seed)

    def script() -> str:
        low, high = drawn.choice(_SCRIPTS)
        return "".join(chr(drawn.randint(low, high)) for _ in range(drawn.randint(1, 6)))

    def part() -> str:
        kind = drawn.random()
        if kind < 0.3:
            return drawn.choice(_WORDS)
        if kind < 0.5:
            return drawn.choice(_SPACES) * drawn.randint(1, 3)
        if kind < 0.65:
            return drawn.choice(_CODE)
        if kind < 0.75:
            return "".join(drawn.choices("0123456789", k=drawn.randint(1, 9)))
        return script() if kind < 0.9 else "".join(drawn.choices(_ENDS, k=drawn.randint(1, 4)))

    return [drawn.choice(("", " ")).join(part() for _ in range(drawn.randint(0, 40))) for _ in range(count)]
