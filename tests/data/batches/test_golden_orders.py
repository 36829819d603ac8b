"""Records come in the order of commit 50565e5, whose stored positions fit: tests/golden/native/README.md."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from golden import native

from mesh_transformer.data.batches.loader import make_val_loader


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("orders")
    return folder, native.unpack_archive("orders", folder)


@pytest.fixture
def expected(files: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    folder, expected = files
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return expected


@pytest.mark.parametrize("order", native.ORDERS)
def test_batches_and_positions(expected: dict[str, Any], order: str) -> None:
    """From the beginning, and after a resume from each position that 50565e5 stored."""
    batches, positions = expected[order]["batches"], expected[order]["positions"]
    loader = native.train_loader(order)
    assert loader.get_state() == positions[0]
    for batch, position in zip(batches, positions[1:], strict=True):
        assert next(loader).tokens.tolist() == batch
        assert loader.get_state() == position
    loader.close()
    for step, position in enumerate(positions[:-1]):
        resumed = native.train_loader(order)
        resumed.set_state(position)
        following = batches[step : step + 2]
        assert [batch.tokens.tolist() for batch in itertools.islice(resumed, len(following))] == following
        resumed.close()


def test_validation(expected: dict[str, Any]) -> None:
    assert native.validation_steps(make_val_loader) == expected["validation"]
