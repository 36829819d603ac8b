"""The message in a record: a `tf.train.Example` whose int64 feature `text` is a list of tokens.

Two short features may stand beside it, which readers of 2021 ignore: `documents`, the lengths of the documents in the
record, and `loss`, the lengths of alternating runs of tokens, the first one not learned. TensorFlow writes the same
bytes. The reader accepts packed and unpacked numbers and ignores other features.
"""

from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from mesh_transformer.environment import command
from mesh_transformer.errors import UserError
from mesh_transformer.sequences import Example

_MAX_TOKEN = 2**31 - 1
# of the three features together, and of other features; TensorFlow has no limits
MAX_NUMBERS = 1 << 20
_MAX_FEATURES = 1000
# the types of a Feature that cannot hold tokens
_OTHER_LISTS = {"bytes_list": "bytes", "float_list": "floats"}
# TensorFlow's schema, but what may have many parts is bytes here: so they are counted before each part is an object. A
# map is a list of entries.
_SCHEMA = """
    name: "mesh_transformer/example.proto" package: "mesh_transformer" syntax: "proto3"
    message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" } }
    message_type { name: "Features" field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
    message_type {
        name: "FeatureEntry"
        field { name: "key" number: 1 type: TYPE_STRING }
        field { name: "value" number: 2 type_name: "Feature" }
    }
    message_type {
        name: "Feature" oneof_decl { name: "kind" }
        field { name: "bytes_list" number: 1 type: TYPE_BYTES oneof_index: 0 }
        field { name: "float_list" number: 2 type: TYPE_BYTES oneof_index: 0 }
        field { name: "int64_list" number: 3 type: TYPE_BYTES oneof_index: 0 }
    }
    message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
"""
_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
_Example, _Entry, _Int64List = (
    message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"mesh_transformer.{name}"))
    for name in ("Example", "FeatureEntry", "Int64List")
)


def encode_example(tokens: np.ndarray, documents: np.ndarray | None = None, loss: np.ndarray | None = None) -> bytes:
    """A serialized Example of non-negative integers; the arguments are the fields of `Example`."""
    example = _Example()
    # in the order of TensorFlow's deterministic serialization
    for name, values in (("documents", documents), ("loss", loss), ("text", tokens)):
        if values is not None:
            entry = _Entry(key=name)
            entry.value.int64_list = _Int64List(value=values.tolist()).SerializeToString()
            example.features.feature.append(entry.SerializeToString())
    return example.SerializeToString()


def decode_example(data: bytes, most: int = MAX_NUMBERS) -> Example:
    """The content of a serialized Example.

    Args:
        most: numbers that it may hold.

    Raises:
        UserError: `data` is no Example; `text` is missing; a feature is of bytes or floats, or outside
            0..2**31 - 1; the lengths of `documents` or `loss` exceed the tokens; it has too many numbers or features.
    """
    try:
        features = _features(data)
        count = sum(_most_numbers(features[name]) for name in ("text", "documents", "loss") if name in features)
        if count > most:
            raise UserError(f"the record has some {count:,} numbers, at most {most:,} are allowed: make it again")
        return _example(features)
    except DecodeError as error:
        raise UserError(f"the record is not a tf.train.Example ({error})") from error


def _features(data: bytes) -> dict[str, Any]:
    """The features of an Example by name, without their numbers.

    Raises:
        DecodeError: it is none.
        UserError: it has too many.
    """
    entries = _Example.FromString(data).features.feature
    if len(entries) > _MAX_FEATURES:
        raise UserError(
            f"the record has {len(entries):,} features, at most {_MAX_FEATURES:,} are allowed: make it again"
        )
    return {entry.key: entry.value for entry in map(_Entry.FromString, entries)}


def _most_numbers(feature: Any) -> int:
    """At least as many as the numbers of a feature: each ends with a byte that has no high bit."""
    return int(np.count_nonzero(np.frombuffer(feature.int64_list, np.uint8) < 0x80))


def _example(features: dict[str, Any]) -> Example:
    if "text" not in features:
        shown = ", ".join(list(features)[:5])
        raise UserError(f"the record has no feature `text` (it has: {shown or 'none'})")
    tokens = _numbers(features, "text").astype(np.int32)
    return Example(tokens, _lengths(features, "documents", len(tokens)), _lengths(features, "loss", len(tokens)))


def _lengths(features: dict[str, Any], name: str, tokens: int) -> np.ndarray | None:
    if name not in features:
        return None
    values = _numbers(features, name)
    if name == "documents" and not values.all():
        raise UserError("its feature `documents` has a length of 0: make the records again")
    if values.sum() > tokens:
        raise UserError(f"the lengths of its feature `{name}` add up to {values.sum()}, and it has {tokens} tokens")
    return values


def _numbers(features: dict[str, Any], name: str) -> np.ndarray:
    feature = features[name]
    for field, kind in _OTHER_LISTS.items():
        if feature.HasField(field):
            raise UserError(
                f"its feature `{name}` holds {kind}; tokens must be int64: make the records from the "
                f"text with {command('records')}"
            )
    values = np.array(_Int64List.FromString(feature.int64_list).value, np.int64)
    # as unsigned numbers, negative ones are the largest: one pass
    if values.view(np.uint64).max(initial=0) > _MAX_TOKEN:
        wrong = values[(values < 0) | (values > _MAX_TOKEN)][0]
        raise UserError(f"the record holds {wrong}, which is no token: allowed are 0..{_MAX_TOKEN}")
    return values
