"""The rows and tables by which families state the keys of config.json."""

import json
from typing import Annotated, Any, ClassVar, Literal

import pytest
from support.families import OF_TRANSFORMERS

from mesh_transformer.checkpoint.hf.config import parse_model
from mesh_transformer.errors import UserError
from mesh_transformer.families import FAMILIES
from mesh_transformer.families.hf_keys import ConfigJson, Hf, HfKeys, Only
from mesh_transformer.fields import Derived, Dims, Positive, Switch, Tokens

# transformers has no default that it can compute with
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}


class Toy(HfKeys):
    HF_DEFAULTS: ClassVar = {"hidden_size": 8, "sliding_window": 4}
    HF_FIXED: ClassVar = {"act": Only("silu", "swish"), "scale": Only(True, written=False)}
    HF_IGNORED: ClassVar = ("ignored",)
    HF_WRITTEN: ClassVar = {"dropout": 0.0}

    width: Annotated[Dims, Hf("hidden_size", "n_embd")]
    heads: Annotated[Dims, Derived("width"), Hf("n_heads", null=True, most=16, why=", as there are pairs")] = 0
    window: Annotated[Tokens | None, Hf("sliding_window")] = None
    eps: Annotated[Positive, Hf("norm_eps")] = 0.5
    bias: Annotated[Switch, Hf("use_bias")] = False
    order: Annotated[Literal["before", "after"], Hf("order", words={"before": "pre", "after": "post"})] = "after"
    ours: Dims = 3


class Renamed(Toy):
    HF_ROWS: ClassVar = {"width": Hf("d"), "bias": None}


def read(values: dict[str, Any], family: type[Toy] = Toy) -> dict[str, Any]:
    keys = ConfigJson(values)
    found = family.from_hf(keys)
    keys.refuse_rest()
    return found.model_dump()


DEFAULTS = {"width": 8, "heads": 0, "window": 4, "eps": 0.5, "bias": False, "order": "after", "ours": 3}


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({}, {}),
        ({"hidden_size": 5}, {"width": 5}),
        ({"n_embd": 5, "hidden_size": None}, {"width": 5}),
        ({"n_heads": None}, {}),
        ({"n_heads": 16}, {"heads": 16}),
        ({"sliding_window": None}, {"window": None}),
        ({"norm_eps": 1}, {"eps": 1.0}),
        ({"use_bias": True, "order": "pre"}, {"bias": True, "order": "before"}),
        ({"act": "swish", "scale": True, "ignored": [1]}, {}),
    ],
)
def test_a_row_reads_its_key(values, fields) -> None:
    assert read(values) == {**DEFAULTS, **fields}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hidden_size": 0}, "^hidden_size is 0: expected a whole number of 1 or more$"),
        ({"hidden_size": None}, "^hidden_size is None: expected"),
        ({"hidden_size": 2, "n_embd": 3}, "these keys mean the same"),
        ({"n_heads": 17}, "^n_heads is 17: expected a whole number from 1 to 16, as there are pairs$"),
        ({"sliding_window": True}, "^sliding_window is True: expected a whole number"),
        ({"norm_eps": 0}, "^norm_eps is 0: expected a number above 0"),
        ({"norm_eps": None}, "^norm_eps is None: expected a number"),
        ({"use_bias": 0}, "^use_bias is 0: expected true or false$"),
        ({"order": "after"}, "^order is 'after': only pre, post are supported$"),
        ({"order": ["pre"]}, "only pre, post are supported"),
        ({"act": "gelu"}, "^act is 'gelu': only silu, swish is supported$"),
        ({"scale": False}, "^scale is false: only true is supported$"),
        ({"scale": "no"}, "^scale is 'no': expected true or false$"),
        ({"dropout": 0.5, "ours": 4}, "'ours' is 4: this key is unknown"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types' is .*: this key is unknown"),
    ],
)
def test_other_values_are_refused(values, reason) -> None:
    with pytest.raises(UserError, match=reason):
        read(values)


def test_keys_of_other_programs_that_change_nothing() -> None:
    """unsloth writes its own into each upload, and transformers wrote which kernel computes attention."""
    others = {"unsloth_fixed": True, "unsloth_version": "2026.10.9", "attn_implementation": "flash_attention_2"}
    assert read({**others, "layer_types": ["full_attention"] * 3}) == read({})


def test_a_row_writes_its_key() -> None:
    assert Toy(width=6, order="before").to_hf() == {
        "hidden_size": 6,
        "n_heads": 0,
        "sliding_window": None,
        "norm_eps": 0.5,
        "use_bias": False,
        "order": "pre",
        "act": "silu",
        "dropout": 0.0,
    }


def test_a_family_may_have_other_keys_than_the_one_that_it_extends() -> None:
    assert read({"d": 5}, Renamed)["width"] == 5
    assert Renamed(width=6).to_hf().keys() == Toy(width=6).to_hf().keys() - {"hidden_size", "use_bias"} | {"d"}
    for key in ("hidden_size", "use_bias"):
        with pytest.raises(UserError, match=f"{key}.*this key is unknown"):
            read({"d": 5, key: 5}, Renamed)


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_every_key_of_a_table_is_read(family) -> None:
    """A misspelled key of a default would have no effect: an empty list is refused only if the key is read."""
    kind = FAMILIES[family]
    rows = [row.names[0] for row in kind.hf_rows().values()]
    for key in {*rows, *kind.HF_FIXED, *kind.HF_DEFAULTS}:
        with pytest.raises(UserError, match=rf"\b{key} is \[\]: "):
            parse_model({"model_type": kind.HF_MODEL_TYPE, **NEEDED.get(family, {}), key: []}, "config.json")
    assert kind.HF_ROWS.keys() <= kind.model_fields.keys()
    names = [name for row in kind.hf_rows().values() for name in row.names] + [*kind.HF_FIXED, *kind.HF_IGNORED]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_missing_keys_have_the_defaults_of_transformers(family) -> None:
    import transformers

    given = {"model_type": FAMILIES[family].HF_MODEL_TYPE, **NEEDED.get(family, {})}
    written = json.loads(transformers.AutoConfig.for_model(**given).to_json_string(use_diff=False))
    assert parse_model(given, "config.json") == parse_model(written, "config.json")


LEGACY = {
    "cache_implementation": "hybrid", "layer_switch": 4, "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True, "use_parallel_embedding": True, "use_qk_norm": False, "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj", "order_of_interleaved_layers": "local_attn_first", "pretraining_tp": 1,
}  # fmt: skip


def test_the_older_keys_of_cohere2_are_read() -> None:
    """Files of the hub have them, and transformers does not read them."""
    base = {"model_type": "cohere2", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4}
    assert parse_model({**base, **LEGACY}, "config.json") == parse_model(base, "config.json")
    for name in ("use_gated_activation", "use_parallel_block", "use_qk_norm"):
        with pytest.raises(UserError, match=name):
            parse_model({**base, name: not LEGACY[name]}, "config.json")


@pytest.mark.parametrize("dims", [{}, {"head_dim": None}, {"head_dim": 8}])
def test_alpha_of_hunyuan_is_another_base(dims: dict) -> None:
    """As in transformers' HunYuanDenseV1RotaryEmbedding."""
    base = {"model_type": "hunyuan_v1_dense", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    rope = {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "rope_theta": 10000.0}
    assert parse_model({**base, **rope, **dims}, "config.json").rotary_base == 10000.0 * 1000.0 ** (8 / 6)
    with pytest.raises(UserError, match="head_dim is 2"):
        parse_model({**base, **rope, "head_dim": 2}, "config.json")
