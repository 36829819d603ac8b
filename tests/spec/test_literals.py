"""Each choice in spec, a `Literal`, has a table of what its values mean, and each table over it has these values."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import mesh_transformer
from mesh_transformer import spec
from mesh_transformer.families import rotary
from mesh_transformer.families.phi3 import Phi3Config
from mesh_transformer.models import feed_forward, modules
from mesh_transformer.ops import positions
from mesh_transformer.ops.experts import routing

# a config may also have no scaling
SCALINGS = {key: row for key, row in {**rotary._SCALINGS, **Phi3Config.SCALINGS}.items() if key != "none"}
TABLES: dict[str, list[dict[str, Any]]] = {
    "Dense.activation": [feed_forward._ACTIVATIONS],
    "ExpertsSpec.activation": [feed_forward._ACTIVATIONS],
    "NormSpec.kind": [modules._NORMS],
    "Rotary.style": [positions._STYLES],
    "RouterSpec.group_score": [routing._GROUP_SCORES],
    "RouterSpec.scores": [routing._SCORES],
    "Scaling.kind": [positions._SCALED, SCALINGS],
}
NO_TABLE = {
    "AttentionSpec.qk_norm_at": "the places of one norm in one function",
    "Array.role": "estimates and fusion ask for single roles",
    "Rotary.precision": "it is the name of a numpy dtype, in which one formula is computed",
}
# folders of the package that compute what spec says
FOLDERS = ("spec", "models", "ops", "families", "train", "estimate", "infer")


def python_modules(*folders: str) -> Iterator[ModuleType]:
    """The modules in these folders of the package."""
    for folder in folders:
        name = f"{mesh_transformer.__name__}.{folder}"
        for found in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            yield importlib.import_module(found.name)


def literals(hint: Any) -> Iterator[Any]:
    """The literals in an annotation."""
    if get_origin(hint) is Literal:
        yield hint
    else:
        for inner in get_args(hint):
            yield from literals(inner)


def choices() -> dict[str, set[str]]:
    """The values of each field of a class in spec that is a choice, as `NormSpec.kind`."""
    found = {}
    for module in python_modules("spec"):
        for owner in vars(module).values():
            if isinstance(owner, type) and owner.__module__ == module.__name__:
                for field, hint in get_type_hints(owner).items():
                    for literal in literals(hint):
                        found[f"{owner.__name__}.{field}"] = set(get_args(literal))
    return found


def test_each_choice_has_a_table_or_a_reason() -> None:
    assert set(choices()) == {*TABLES, *NO_TABLE}


@pytest.mark.parametrize("field", TABLES)
def test_a_table_has_the_values_of_its_choice(field: str) -> None:
    for table in TABLES[field]:
        assert table.keys() == choices()[field]


def test_each_table_over_a_choice_is_known() -> None:
    known = [id(table) for tables in TABLES.values() for table in tables]
    values = choices().values()
    for module in python_modules(*FOLDERS):
        for name, table in vars(module).items():
            if isinstance(table, dict) and table and any(table.keys() <= some for some in values):
                assert id(table) in known, f"{module.__name__}.{name}"


def test_choices_are_found_in_annotations() -> None:
    assert choices()["NormSpec.kind"] == set(get_args(get_type_hints(spec.NormSpec)["kind"]))
    assert list(literals(dict[str, Literal["a"] | None])) == [Literal["a"]]


def test_every_position_encoding_is_computed() -> None:
    assert set(positions.ENCODINGS) == set(get_args(spec.PositionEncoding))
