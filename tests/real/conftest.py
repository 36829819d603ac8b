"""The trained model, and what transformers computes with it (tests/golden/real)."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import real_model

from mesh_transformer.checkpoint.open import Checkpoint


@pytest.fixture(scope="session")
def real_file() -> Path:
    """The GGUF file."""
    path = real_model.path()
    if not path.is_file():
        pytest.skip("no trained model: python tests/support/real_model.py downloads it")
    return path


@pytest.fixture(scope="session")
def checkpoint(real_file: Path) -> Checkpoint:
    return Checkpoint.open(str(real_file))


@pytest.fixture(scope="session")
def values() -> Any:
    """What transformers computes in float32."""
    return json.loads((Path(__file__).parents[1] / "golden/real/values.json").read_text())
