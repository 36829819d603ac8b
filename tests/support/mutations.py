"""Mutations of files and messages, for tests of damaged and hostile input.

A `random.Random` chooses them: with a seed, or `hypothesis.strategies.randoms()`.
"""

import json
import re
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

# JSON values at the limits of types and ranges, and names that a reader of a file could mistake for another thing
SPECIAL = [
    None, True, False, -1, 0, 1, 2, 7, 1.5, 28.0, 2**31 - 1, 2**31, 2**32, 2**40, 2**63, 2**70, 10**9, -(10**9),
    10**400, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"), "", "x", "1", "\ud800", "\0", [], [[]], {},
    {"": None}, "object", "O", "V8", "str", "float32", "float64", "int32", "bfloat16", "int4", "datetime64",
    "__file__", "<f4", ">f4", [-1], [0], [2**40, 2**40], [1] * 99, [True], ["1"], [None], [[2], "float32", 3],
    [["a"], 10**9], "step", "../x",
]  # fmt: skip
LONG_CHARS = 100_000
DEPTHS = (3, 50, 900, 1000, 5000)
# the part of a file that most mutations of bytes change, because it holds the header
HEADER_BYTES = 3000
_KEY = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:')


def mutated_json(random: Random, document: Any, donors: Sequence[Any] = (), *, large: bool = True) -> bytes:
    """The text of a JSON document after one to three edits of its values, and at times of its text.

    Args:
        donors: documents, of which objects take over keys.
        large: whether values may become long or deep.
    """
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        # a copy: the next edit changes no value that the last one took from elsewhere
        document = json.loads(json.dumps(document))
        if isinstance(document, dict | list) and document:
            _edit(random, document, donors, large)
    text = json.dumps(document, ensure_ascii=random.random() < 0.9).encode("utf-8", "surrogatepass")
    kind = random.randrange(40)
    if kind == 0:
        return mutated_bytes(random, text)
    if kind == 1:
        return _key_twice(random, text)
    if kind == 2 and large:
        return _nested(random, text)
    return text


def _edit(random: Random, document: Any, donors: Sequence[Any], large: bool) -> None:
    holder, key = _place(random, document)
    kinds = ["special", "special", "special", "change", "change", "delete", "copy", "take"]
    kind = random.choice([*kinds, "wrap", "long"] if large else kinds)
    if kind == "special":
        holder[key] = random.choice(SPECIAL)
    elif kind == "change":
        holder[key] = _changed(random, holder[key])
    elif kind == "delete":
        del holder[key]
    elif kind == "copy":
        source, name = _place(random, document)
        # a copy: a document has no cycles
        holder[key] = json.loads(json.dumps(source[name]))
    elif kind == "wrap":
        holder[key] = random.choice([[holder[key]], {str(key): holder[key]}, [holder[key]] * 40])
    elif kind == "take" and donors:
        source = random.choice(donors)
        if isinstance(holder, dict) and isinstance(source, dict) and source:
            name = random.choice(list(source))
            holder[name] = random.choice([source[name], random.choice(SPECIAL)])
    elif kind == "long":
        holder[key] = random.choice(["x" * LONG_CHARS, [0] * LONG_CHARS, "é\n" * 999, {str(i): i for i in range(999)}])


def _place(random: Random, document: Any) -> tuple[Any, Any]:
    """An object or a list of the document, and a key or an index in it. Every depth is about equally likely."""
    holder = document
    while True:
        key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
        inside = holder[key]
        if not isinstance(inside, dict | list) or not inside or random.random() < 0.3:
            return holder, key
        holder = inside


def _changed(random: Random, value: Any) -> Any:
    """A value of the same type near to this one, or far from it."""
    match value:
        case bool():
            return not value
        case int() | float() if abs(value) < 1e30:
            return random.choice([value + 1, value - 1, -value, value * 2, value * 1000, value + 0.5, str(value)])
        case str():
            return mutated_bytes(random, value.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
        case list():
            return random.choice([value[1:], value[:-1], value * 2, value[::-1]])
        case dict():
            return list(value.items())
    return random.choice(SPECIAL)


def _key_twice(random: Random, text: bytes) -> bytes:
    """JSON text with a key that an object has twice."""
    found = list(_KEY.finditer(text))
    if not found:
        return text
    at, key = random.choice(found).start(), random.choice(found).group()
    value = json.dumps(random.choice(SPECIAL)).encode()
    return text[:at] + key + value + b", " + text[at:]


def _nested(random: Random, text: bytes) -> bytes:
    """JSON text in which brackets, more or less deep, replace a value or hold all of it."""
    depth, inside = random.choice(DEPTHS), text
    found = [match.end() for match in _KEY.finditer(text)]
    start = stop = 0
    if found and random.random() < 0.8:
        start = random.choice(found)
        stop = min((at for at in (text.find(end, start) for end in (b",", b"}")) if at >= 0), default=start)
        inside = text[start:stop]
    else:
        stop = len(text)
    opened, closed = random.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return text[:start] + opened * depth + inside + closed * random.choice([depth, depth, 0]) + text[stop:]


def manifest_of(body: bytes) -> bytes:
    """The manifest of a native step with this body, and with its right CRC if the body is JSON."""
    try:
        crc = zlib.crc32(json.dumps(json.loads(body), sort_keys=True).encode())
    except (ValueError, RecursionError):
        crc = 0
    return b'{"crc32": %d, "body": %s}' % (crc, body)


def mutated_bytes(random: Random, raw: bytes) -> bytes:
    """Bytes after one to three edits: changed bits, bytes and digits, insertions, cuts and repetitions."""
    data = bytearray(raw)
    for _ in range(random.choice([1, 1, 2, 3])):
        size = len(data)
        at = random.randrange(max(1, random.choice([size, min(size, HEADER_BYTES)])))
        match random.choice(["flip", "set", "digit", "digit", "insert", "cut", "end", "repeat"]):
            case "flip" if data:
                data[at] ^= 1 << random.randrange(8)
            case "set" if data:
                data[at] = random.randrange(256)
            # keeps JSON valid
            case "digit":
                digits = [i for i in range(at, min(at + 60, size)) if 48 <= data[i] <= 57]
                if digits:
                    data[digits[0] : digits[0] + 1] = b"%d" % random.choice([0, 1, 9, 10, 99, 2**31, 2**63])
            case "insert":
                data[at:at] = random.randbytes(random.randrange(1, 40))
            case "cut":
                del data[at : at + random.randrange(1, 256)]
            case "end" if random.random() < 0.3:
                del data[at:]
            case "repeat":
                data[at:at] = data[at : at + random.randrange(1, 64)]
    return bytes(data)
