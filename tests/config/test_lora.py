"""The group lora: which matrices have adapters, which of them share an a, and what is refused."""

import re

import pytest
from support.builders import TINY
from support.families import MODELS

from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.families import FAMILIES
from mesh_transformer.spec import Adapter, Lora


def adapters(model: dict, *overrides: str) -> dict[str, Adapter]:
    """By path of the matrix."""
    (form,) = parse_config({**TINY, "model": model}, ["lora.rank=3", *overrides]).decoder.forms
    assert isinstance(form, Lora)
    return form.by_path


def test_no_adapters_without_a_rank() -> None:
    config = parse_config(TINY)
    assert config.decoder.forms == ()
    assert not config.decoder.adapted
    assert config.decoder == config.model.decoder()


@pytest.mark.parametrize("name", MODELS)
def test_all_matrices_of_the_layers_have_adapters(name: str) -> None:
    decoder = parse_config({**TINY, "model": MODELS[name]}).decoder
    paths = {path for kind in decoder.kinds for path, array in decoder.matrices(kind).items() if array.role != "other"}
    of_model = adapters(MODELS[name])
    assert of_model.keys() == paths
    assert not [path for path in paths if "router" in path or "norm" in path]
    assert all(adapter.rank == 3 and adapter.scale == 1 for adapter in of_model.values())


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("gpt_neox", [("attention/q/w", "attention/k/w", "attention/v/w")]),
        ("gpt2", [("attention/q/w", "attention/k/w", "attention/v/w")]),
        ("bloom", [("attention/q/w", "attention/k/w", "attention/v/w")]),
        ("codegen", [("attention/q/w", "attention/k/w", "attention/v/w")]),
        ("phi3", [("attention/q/w", "attention/k/w", "attention/v/w"), ("ff/in/w", "ff/gate/w")]),
        ("glm4", [("ff/in/w", "ff/gate/w")]),
        ("mixtral", [("ff/experts/gate", "ff/experts/in")]),
        ("llama", []),
    ],
)
def test_what_is_one_tensor_in_transformers_shares_an_a(name: str, groups: list[tuple[str, ...]]) -> None:
    by_owner: dict[str, list[str]] = {}
    for path, adapter in adapters(MODELS[name]).items():
        by_owner.setdefault(adapter.a_of, []).append(path)
    shared = sorted(sorted(paths) for paths in by_owner.values() if len(paths) > 1)
    assert shared == sorted(sorted(group) for group in groups)


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        ("llama", '["q","v"]', ["attention/q/w", "attention/v/w"]),
        ("llama", "q_proj", ["attention/q/w"]),
        ("llama", "self_attn.o_proj", ["attention/o/w"]),
        ("llama", "attention/q", ["attention/q/w"]),
        ("gpt_neox", "query_key_value", ["attention/q/w", "attention/k/w", "attention/v/w"]),
        ("mixtral", '["gate","in"]', ["ff/experts/gate", "ff/experts/in"]),
        ("deepseek_v3", "ff/experts/out", ["ff/experts/out"]),
        ("deepseek_v3", "shared/in", ["ff/shared/in/w"]),
        ("deepseek_v3", "kv_b_proj", ["attention/kv_b/w"]),
        ("jaxformer", "q_b", ["attention/q_b/w"]),
    ],
)
def test_targets(name: str, targets: str, expected: list[str]) -> None:
    assert list(adapters(MODELS[name], f"lora.targets={targets}")) == expected


def test_alpha() -> None:
    assert {adapter.scale for adapter in adapters(MODELS["llama"], "lora.alpha=12").values()} == {4.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["lora.rank=0"], "lora.rank = 0: expected a whole number, 1 or more"),
        (["lora.rank=-2"], "lora.rank = -2: expected a whole number, 1 or more"),
        (["lora.rank=65"], "lora.rank 65 is over a side of attention/q, which is 64 x 64: at most 64 is possible"),
        (["lora.rank=4", "lora.targets=key"], "lora.targets: no matrix of the layers is called 'key': name some of "),
        (["lora.rank=4", "lora.targets=[]"], 'lora.targets: give "all-linear" alone, or at least one name of a matrix'),
        (["lora.alpha=8"], "lora.alpha has no effect without lora.rank: set the rank (--set lora.rank=16), or remove"),
        (["lora.targets=q"], "lora.targets has no effect without lora.rank"),
        (["lora.rank=4", "lora.dropout=1"], "lora.dropout = 1: expected"),
    ],
)
def test_refused(changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse_config(TINY, changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gpt_neox",
            ['lora.targets=["q","v"]'],
            "lora.targets has attention/q, attention/v, and transformers has attention/q, attention/k, attention/v in "
            "one matrix (attention.query_key_value), which has one adapter: name all of them "
            """(--set 'lora.targets=["attention/q", "attention/k", "attention/v"]'), or none""",
        ),
        ("mixtral", ["lora.targets=ff/experts/in"], "in one matrix (experts.gate_up_proj)"),
        ("mixtral", ["lora.dropout=0.1"], "lora.dropout 0.1 is not computed for routed experts (ff/experts/gate"),
    ],
)
def test_refused_for_a_family(name: str, changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse_config({**TINY, "model": MODELS[name]}, ["lora.rank=2", *changes])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("lora_r", "lora.rank"),
        ("lora_alpha", "lora.alpha"),
        ("lora_dropout", "lora.dropout"),
        ("target_modules", "lora.targets"),
        ("load_in_4bit", "lora.rank"),
    ],
)
def test_names_of_other_programs(theirs: str, ours: str) -> None:
    with pytest.raises(UserError, match=rf"did you mean {re.escape(ours)}\?"):
        parse_config(TINY, [f"{theirs}=4"])
    with pytest.raises(UserError, match=rf"did you mean {re.escape(ours)}\?"):
        parse_config({**TINY, "lora": {theirs: 4}})


def test_every_family_can_have_adapters() -> None:
    assert MODELS.keys() | {"gptj"} >= FAMILIES.keys()
