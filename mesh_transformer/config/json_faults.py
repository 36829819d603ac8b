"""What is wrong with text that is not JSON, in words: the line, and the cause where it is one that people often make."""

import json
import re

SHOWN_CHARS = 40
TRAILING = "a comma before the closing bracket"
NO_COMMA = "a comma is missing after the value"
END = r"(?=[\s,:{}\[\]]|$)"  # of a word
# what the json module says, what stands at the fault, the cause; the first row that fits counts
CAUSES = [
    ("", r"(<{7}|={7}|>{7}|\|{7})(\s|$)", "{line}: an unfinished git merge"),
    ("", r"//|#|/\*", "JSON has no comments"),
    ("Unterminated string", "", "a string without its closing quote"),
    ("Invalid control character", "", "a string without its closing quote"),
    ("Invalid \\escape", "", "a single backslash in a string: write two"),
    ("Extra data", "", "more text after the last closing bracket"),
    ("", "$", "the file ends before the last bracket is closed"),
    ("", "['\u2018\u2019\u201c\u201d]", '{word[0]} is not a quote in JSON: write "'),
    ("Expecting ','", '"', NO_COMMA),
    ("Expecting ','", "", "expected a comma or a closing bracket, found {word}"),
    ("Expecting ':'", "", 'expected a colon, as in "key": value, found {word}'),
    ("Expecting property name", "", "expected a key in double quotes, found {word}"),
    ("", "True" + END, "True is not JSON: write true"),
    ("", "False" + END, "False is not JSON: write false"),
    ("", "None" + END, "None is not JSON: write null"),
    ("", r'[^\s,:{}\[\]]*"' + END, "{word}: a string without its opening quote"),
    ("", "", "expected a number, true, false, null, a string in double quotes, {{ or [, found {word}"),
]


def explain(text: str, error: json.JSONDecodeError) -> str:
    """`line N: cause` for text that the json module refused with `error`."""
    before, after = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    # from Python 3.13 on the error stands at the comma itself
    if re.match(r".?,\s*[}\]]", before[-1:] + after, re.DOTALL):
        cause = TRAILING
    else:
        cause = next(
            cause for said, at, cause in CAUSES if error.msg.startswith(said) and re.match(at, after)
        )
    word = re.split(r"[\s,:{}\[\]]", after, maxsplit=1)[0][:SHOWN_CHARS] or after[:1]
    # what is missing, or there too much, before a line's first character stands on the line before
    place = len(before) if cause in (TRAILING, NO_COMMA) else error.pos
    line = "".join(after.splitlines()[:1])[:SHOWN_CHARS].rstrip()
    return f"line {text.count(chr(10), 0, place) + 1}: {cause.format(word=word, line=line)}"


def line_of(text: str, pattern: str) -> str:
    """`line N`, of the first match outside the strings."""
    outside = re.sub(r'"(?:\\.|[^"\\])*"', lambda string: " " * len(string.group()), text)
    match = re.search(pattern, outside)
    return f"line {text.count(chr(10), 0, match.start() if match else 0) + 1}"
