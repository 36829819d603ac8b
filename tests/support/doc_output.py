"""Whether a command printed what its page says.

The page's lines appear in the output in this order, other lines may stand between them. In a line

- `...` stands for any text, and spaces for any number of spaces;
- a number with a unit of time or a rate (`5.87 s`, `1,200 tokens/s`, `40%`) stands for any number: it depends on the
  machine;
- a number with a point, such as a loss, may differ by 3%: another CPU adds in another order;
- all else is equal, whole numbers too.
"""

import re
from collections.abc import Sequence

TOLERANCE = 0.03
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_VARIES = re.compile(rf"({_NUMBER})(?=\s?(?:%|(?:ms|s|min|minutes|seconds|\S+/s)(?:\W|$)))")
_DECIMAL = re.compile(r"(-?\d[\d,]*\.\d+)")
_TOKEN = re.compile(rf"{_VARIES.pattern}|{_DECIMAL.pattern}|(\.\.\.)|(\s+)")


def missing(printed: Sequence[str], output: str) -> str | None:
    """The first line of the page that the output does not have, or None."""
    lines = iter(output.splitlines())
    for expected in filter(str.strip, printed):
        pattern, decimals = _pattern(expected)
        if not any(_same(pattern, decimals, line) for line in lines):
            return expected
    return None


def _pattern(expected: str) -> tuple[re.Pattern[str], list[float]]:
    """A pattern with a group for each number that may differ a little, and these numbers."""
    text, place, decimals = "", 0, []
    for token in _TOKEN.finditer(expected.strip()):
        varies, decimal, dots, _ = token.groups()
        text += re.escape(expected.strip()[place : token.start()])
        place = token.end()
        if varies:
            text += _NUMBER
        elif decimal:
            text += f"({_NUMBER})"
            decimals.append(_number(decimal))
        else:
            text += ".*" if dots else r"\s+"
    return re.compile(text + re.escape(expected.strip()[place:])), decimals


def _same(pattern: re.Pattern[str], decimals: Sequence[float], line: str) -> bool:
    found = pattern.search(line)
    return found is not None and all(
        abs(_number(there) - here) <= TOLERANCE * abs(here)
        for there, here in zip(found.groups(), decimals, strict=True)
    )


def _number(text: str) -> float:
    return float(text.replace(",", ""))
