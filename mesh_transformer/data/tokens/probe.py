"""Some two hundred odd texts, on which two encoders are compared before the second one is used."""

import random
from collections.abc import Iterable

_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 81, 100, 127, 129, 255, 257, 1000)
_RUNS = (" ", "\n", "\t", "a", "=", "-", "0", "\u4e2d", "ha", "() ", " \n", "\r\n")
_TEXTS = (
    "",
    "\0",
    "\0" * 300 + "a\0b",
    " " * 5000,
    " " * 5000 + "a",
    "a" * 20000,
    "\ufeff",
    "\ufeffabc",
    "a\ufeff b",
    "a\r\nb\r\n\r\n c\r d\n\n  e  \n \t f  ",
    "\u00a0a\u2003b\u0085c\u2028d\u3000e\u200bf\x1cg\x0bh\x0ci",
    "1234567890 12 345 6,789.01 1\u00bd \u2163 \u0664\u0662 \u4e00\u767e 3\u00b2",
    "I'm you're he'll we've it's I'd can't 'tis 'S'T'RE'VE'M'LL'D 's't IT\u2019S it'\u017f '\u212a ''s '",
    "Don't stop!!! (really...) [x]{y}<z> #a @b $1.00 50% a&b a_b a__b__ C++ a->b a=>b != \u2026\u2014\u2013",
    "你好，世界。漢字とかなカナ、한국어 \u1112\u1161\u11ab",
    "गुरु ภาษาไทย العَرَبِيّة עִבְרִית Привет, мир! Ελληνικά Việt",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f44d\U0001f3fd 1\ufe0f\u20e3 \U0001f1e9\U0001f1ea",
    "e\u0301 E\u0301\u0327 \u0301a \u1e9b\u0323 \u212b \u2126 \ufb01 \uac01 \u1100\u1161\u11a8",
    "a\u0323\u0307 a\u0307\u0323 z" + "\u0300" * 200,
    "\ufffd \uffff \ue000 \U000f0000 \U0010ffff \U000e0041 \U0001e900 \U00016d40 \U000105c9\u0307",
    "<|endoftext|> <|im_start|>user<|im_end|> <s>[INST]</s> <think> </think><tool_call>",
    "def f(x):\n    if x:\n        return  {  'a' : 1 }\n\t\treturn\t\n\n\n    # \u00fc\n",
    "https://example.org/a-b_c?d=e&f=%20#g me@example.org C:\\dir\\file.txt 2026-11-25T12:00:00Z 0xDEADbeef",
    "\u01c5\u01c8 \u1f88 \u02b0\u02bc \u00aa\u00ba \u2c7c \u1d2c \u0345 \u3007 \U0001d400 \u24d0 \u216b",
)
_RANGES = (
    *((32, 127), (9, 14), (32, 33), (39, 40), (0xA0, 0x250), (0x2B0, 0x370), (0x370, 0x600), (0x600, 0xE80)),
    *((0x1100, 0x1200), (0x1E00, 0x2100), (0x2100, 0x2C00), (0x3000, 0x3100), (0x4E00, 0xA000), (0xAC00, 0xD7A4)),
    *((0xF900, 0xFE10), (0xFE10, 0x10000), (0x10000, 0x12000), (0x1D400, 0x1D800), (0x1F300, 0x1FB00)),
)


def probe_texts(names: Iterable[str] = ()) -> list[str]:
    """Texts with white space, long runs, repetitions, digits, many scripts, emoji, combining characters, and mixtures.

    The texts are always the same.

    Args:
        names: of added tokens, which stand between other characters.
    """
    texts = [*_TEXTS]
    for run in _RUNS:
        texts += [" ".join(f"{run * length}x" for length in _LENGTHS), run * 300, f"{run * 70}\n{run * 71} "]
    drawn = random.Random(0)
    for _ in range(140):
        chosen = [drawn.choice(_RANGES) for _ in range(4)]
        texts.append("".join(chr(drawn.randrange(*drawn.choice(chosen))) for _ in range(drawn.randrange(1, 200))))
    texts += [f"a{name}b {name} {name}{name}\n{name[:-1]}" for name in names]
    return texts
