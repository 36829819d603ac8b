"""How texts are split into words before byte pairs are merged: the table of `tokenizer.ggml.pre`.

A file names the splitting of its model's tokenizer; these are the stages of that tokenizer.json. llama.cpp has the same
words in src/llama-vocab.cpp, with approximations where its regular expressions lack a class.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _PATHS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED = rf"{_BEFORE}{_UPPER}*{_LOWER}+%s|{_BEFORE}{_UPPER}+{_LOWER}*%s"
# one stage: GPT-2's own words
GPT2 = None
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)

# DeepSeek's letters of the alphabets with upper and lower case
_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛ"
    "ὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN = "[一-龥ࠀ-一가-퟿]+"


class Split(NamedTuple):
    """The stages of a splitting.

    Args:
        stages: regular expressions, each of which splits the pieces of the one before; None: GPT-2's words, the last
            stage. "digits": each digit by itself.
        normalizer: Unicode's form of the text, before all.
        whole_words: a word that is a token is one, whatever the merges say.
        begins: a text begins with the start token, unless the file says otherwise.
    """

    stages: Sequence[str | None]
    normalizer: str | None = None
    whole_words: bool = False
    begins: bool = False


_DIGITS = Split(("digits", GPT2))
_LLAMA3 = Split((rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",), whole_words=True, begins=True)
_QWEN = Split((rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}",))
_O200K = Split((rf"{_CASED % (_ENDINGS + '?', _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}",))
SPLITS: Mapping[str, Split] = {
    "gpt-2": Split((GPT2,)),
    "olmo": Split((GPT2,), normalizer="NFC"),
    "exaone4": Split((GPT2,)),
    "a.x-4.0": Split((GPT2,)),
    "mellum": Split((GPT2,)),
    "phi-2": Split((GPT2,)),
    "trillion": Split((GPT2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "minerva-7b": _DIGITS,
    "command-r": _DIGITS._replace(normalizer="NFC"),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "pixtral": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3._replace(whole_words=False, begins=False),
    "dbrx": _LLAMA3._replace(whole_words=False, begins=False),
    "glm4": _LLAMA3._replace(begins=False),
    "glm5": _LLAMA3._replace(begins=False),
    "chatglm-bpe": _LLAMA3._replace(whole_words=False, begins=False),
    "qwen2": _QWEN._replace(normalizer="NFC"),
    "deepseek-r1-qwen": _QWEN,
    "hunyuan": _QWEN,
    "kormo": _QWEN,
    "megrez": _QWEN,
    "stablelm2": _QWEN,
    "tekken": Split((rf"{_CASED % ('', '')}|\p{{N}}|{_PATHS}|{_SPACES}",), whole_words=True, begins=True),
    "gpt-4o": _O200K,
    "kanana2": _O200K,
    "llama4": _O200K,
    "minimax-m2": _O200K,
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _HAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, "digits")),
    "deepseek-v3": Split(_DEEPSEEK),
    "hunyuan-dense": Split(_DEEPSEEK),
    "seed-coder": Split((rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "bloom": Split((" ?[^(\\s|.,!?…。，、।۔،)]+",)),
}


def pre_tokenizer(split: Split) -> dict[str, Any]:
    """The stages as tokenizer.json has them."""
    stages: list[dict[str, Any]] = [
        {"type": "Digits", "individual_digits": True}
        if stage == "digits"
        else {"type": "Split", "pattern": {"Regex": stage}, "behavior": "Isolated", "invert": False}
        for stage in split.stages
        if stage is not GPT2
    ]
    words = split.stages[-1] is GPT2
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    return {"type": "Sequence", "pretokenizers": [*stages, to_bytes]}
