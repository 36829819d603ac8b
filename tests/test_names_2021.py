"""The Python names of 2021: each works, or names what does the same."""

import importlib

import pytest

from mesh_transformer.cluster.driver import tpu_cluster
from mesh_transformer.names_2021 import REPLACEMENTS


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in REPLACEMENTS.items() for name in names])
def test_a_name_that_is_gone(module: str, name: str) -> None:
    with pytest.raises(ImportError) as raised:
        exec(f"from {module} import {name}")
    assert str(raised.value) == f"{module}.{name} was of 2021; today it is {REPLACEMENTS[module][name]}"


@pytest.mark.parametrize("module", REPLACEMENTS)
def test_other_names_are_absent_as_in_any_module(module: str) -> None:
    assert not hasattr(importlib.import_module(module), "no_such_name")


def test_tpu_cluster() -> None:
    from mesh_transformer.TPU_cluster import TPUCluster

    assert TPUCluster is tpu_cluster.TPUCluster
