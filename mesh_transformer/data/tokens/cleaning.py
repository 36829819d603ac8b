"""Optional repairs of a document's text: broken Unicode, WikiText spacing."""

import re
from collections.abc import Callable

_WIKITEXT = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # separators inside numbers and compounds
        (r" @([-,.])@ ", r"\1"),
        (r"(?m)^ ?((?:= )+)(.+?)((?: =)+) ?$", lambda m: _heading(m[1], m[2], m[3])),
        (r"(?<=[^\s]) ('(?:s|d|m|ll|re|ve)\b)", r"\1"),
        (r" (n't)\b", r"\1"),
        # the possessive of a plural
        (r"(?<=s) ' (?=[^\W\d_])", r"' "),
        (r'" ([^"\n]*?) "', r'"\1"'),
        (r"(?<=\s)' ([^'\n]+?) '(?=[\s,.;:!?]|$)", r"'\1'"),
        (r"([(\[{]) ", r"\1"),
        (r" ([)\]}])", r"\1"),
        (r" ([,.;:!?])(?=[\s\"')\]]|$)", r"\1"),
        (r"(?<=\d) (?=[%°])", ""),
        (r"(?<=[$£€]) (?=\d)", ""),
        (r"(?m)^ | $", ""),
    )
)


def _heading(left: str, title: str, right: str) -> str:
    return f"{left.replace(' ', '')} {title.strip()} {right.replace(' ', '')}"


def detokenize_wikitext(text: str) -> str:
    """Undo the spacing of the WikiText corpora: `1 @,@ 000 ( about )` becomes `1,000 (about)`."""
    for pattern, replacement in _WIKITEXT:
        text = pattern.sub(replacement, text)
    return text


def make_cleaner(ftfy: bool, wikitext: bool) -> Callable[[str], str]:
    """A function that applies the chosen repairs to a text."""
    steps: list[Callable[[str], str]] = []
    if ftfy:
        from ftfy import fix_text

        steps.append(lambda text: fix_text(text, normalization="NFKC"))
    if wikitext:
        steps.append(detokenize_wikitext)

    def clean(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return clean
