"""Results of an evaluation on disk, so that one that was interrupted, or repeated, computes only what is new."""

import hashlib
import json
import os
import sqlite3
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer.checkpoint.manifest import describe
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.models.model import Model, Params

Answer = list[Any] | str  # JSON: log-likelihood and greedy flag, or a text


class Answers:
    """A file of answers by model and request. Its first process reads and writes it; the others hear what it found.

    A model is known by its weights, not by where they lay: the same checkpoint elsewhere finds its answers, and one
    that was overwritten does not.

    Raises:
        UserError: the file cannot be used.
    """

    def __init__(self, path: str):
        self._model, self._database = "", None
        if jax.process_index() > 0:
            return
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._database = sqlite3.connect(path)
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (model TEXT, request TEXT, answer TEXT, "
                "PRIMARY KEY (model, request)) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"--cache {path} cannot be used ({error}): name a file of its own") from error

    def of(self, params: Params, model: Model, tokenizer: Tokenizer) -> None:
        """From now on, answers are those of this model."""
        whole = [fingerprint(params), repr(model), tokenizer.fingerprint]
        self._model = _digest(whole)

    def find(self, requests: Sequence[Any]) -> dict[int, Answer]:
        """The answers that are known, by the index of their request; the same in every process."""
        known = {}
        if self._database is not None:
            query = "SELECT answer FROM answers WHERE model = ? AND request = ?"
            for i, request in enumerate(requests):
                for (answer,) in self._database.execute(query, (self._model, _digest(request))):
                    known[i] = json.loads(answer)
        return {int(i): answer for i, answer in _from_first_process(known).items()}

    def keep(self, request: Any, answer: Answer) -> None:
        """Write an answer; it is on disk after `commit`."""
        if self._database is not None:
            row = (self._model, _digest(request), json.dumps(answer))
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", row)

    def commit(self) -> None:
        """Make sure of what was kept."""
        if self._database is not None:
            self._database.commit()


def fingerprint(params: Params) -> list[int]:
    """A checksum of each array of a tree. It does not depend on the mesh."""
    return [spec.checksum for spec in describe(params, {}).tensors.values()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _from_first_process(value: dict[int, Any]) -> dict[Any, Any]:
    """What the first process has, in all."""
    raw = json.dumps(value).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(raw))))
    padded = np.frombuffer(raw.ljust(size)[:size], np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))
