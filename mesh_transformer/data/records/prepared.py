"""What the manifest.json of a prepared data set says of its tokens, as far as a run or its plan needs it."""

import os
from typing import NamedTuple, Self

from mesh_transformer import files
from mesh_transformer.config import strict_json
from mesh_transformer.fields import size


class Prepared(NamedTuple):
    """Facts of a data set; None: unknown.

    Args:
        n_vocab: size of the vocabulary.
        tokens: number of training tokens.
        tokenizer: its name or folder, as the command got it.
        fingerprint: of the tokenizer.
    """

    n_vocab: int | None = None
    tokens: int | None = None
    tokenizer: str | None = None
    fingerprint: str | None = None

    @classmethod
    def beside(cls, path: str) -> Self:
        """The facts in the manifest.json beside a file of records, an index or a text, if there is one.

        Raises:
            UserError: the manifest is no JSON object.
        """
        manifest = files.join(os.path.dirname(path), "manifest.json")
        if not files.exists(manifest):
            return cls()
        content = strict_json.read_object(manifest)
        train, options = content.get("train"), content.get("options")
        return cls(
            size(content.get("n_vocab")),
            size(train.get("tokens")) if isinstance(train, dict) else None,
            _text(options.get("tokenizer")) if isinstance(options, dict) else None,
            _text(content.get("tokenizer_sha256")),
        )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
