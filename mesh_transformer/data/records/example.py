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
# the types of a Feature that cannot hold tokens
_OTHER_LISTS = {"bytes_list": "bytes", "float_list": "floats"}
# TensorFlow's schema under another package name, so that one process can load both
_SCHEMA = """
    name: "mesh_transformer/example.proto" package: "mesh_transformer" syntax: "proto3"
    message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" } }
    message_type {
        name: "Features"
        field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "Features.FeatureEntry" }
        nested_type {
            name: "FeatureEntry" options { map_entry: true }
            field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
            field { name: "value" number: 2 type_name: "Feature" label: LABEL_OPTIONAL }
        }
    }
    message_type {
        name: "Feature"
        field { name: "bytes_list" number: 1 type_name: "OtherList" }
        field { name: "float_list" number: 2 type_name: "OtherList" }
        field { name: "int64_list" number: 3 type_name: "Int64List" }
    }
    message_type { name: "OtherList" }
    message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
"""
_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
_Example = message_factory.GetMessageClass(_pool.FindMessageTypeByName("mesh_transformer.Example"))


def encode_example(tokens: np.ndarray, documents: np.ndarray | None = None, loss: np.ndarray | None = None) -> bytes:
    """A serialized Example of non-negative integers; the arguments are the fields of `Example`."""
    example = _Example()
    for name, values in (("text", tokens), ("documents", documents), ("loss", loss)):
        if values is not None:
            example.features.feature[name].int64_list.value.extend(values.tolist())
    # the order of a map's entries is not fixed otherwise
    return example.SerializeToString(deterministic=True)


def decode_example(data: bytes) -> Example:
    """The content of a serialized Example.

    Raises:
        UserError: `data` is no Example; `text` is missing; a feature is of bytes or floats, or outside
            0..2**31 - 1; the lengths of `documents` or `loss` exceed the tokens.
    """
    try:
        features = _Example.FromString(data).features.feature
    except DecodeError as error:
        raise UserError(f"the record is not a tf.train.Example ({error})") from error
    if "text" not in features:
        shown = ", ".join(list(features)[:5])
        raise UserError(f"the record has no feature `text` (it has: {shown or 'none'})")
    tokens = _numbers(features, "text").astype(np.int32)
    return Example(tokens, _lengths(features, "documents", len(tokens)), _lengths(features, "loss", len(tokens)))


def _lengths(features: Any, name: str, tokens: int) -> np.ndarray | None:
    if name not in features:
        return None
    values = _numbers(features, name)
    if name == "documents" and not values.all():
        raise UserError("its feature `documents` has a length of 0: make the records again")
    if values.sum() > tokens:
        raise UserError(f"the lengths of its feature `{name}` add up to {values.sum()}, and it has {tokens} tokens")
    return values


def _numbers(features: Any, name: str) -> np.ndarray:
    feature = features[name]
    for field, kind in _OTHER_LISTS.items():
        if feature.HasField(field):
            raise UserError(
                f"its feature `{name}` holds {kind}; tokens must be int64: make the records from the "
                f"text with {command('records')}"
            )
    values = np.array(feature.int64_list.value, np.int64)
    # as unsigned numbers, negative ones are the largest: one pass
    if values.view(np.uint64).max(initial=0) > _MAX_TOKEN:
        wrong = values[(values < 0) | (values > _MAX_TOKEN)][0]
        raise UserError(f"the record holds {wrong}, which is no token: allowed are 0..{_MAX_TOKEN}")
    return values
