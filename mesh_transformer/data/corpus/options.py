"""The options of `prepare`."""

from dataclasses import dataclass

from mesh_transformer.errors import UserError


@dataclass(frozen=True)
class SequenceOptions:
    """How text becomes sequences.

    Args:
        seq: tokens of a sequence; a record holds one more.
        seed: seed of all shuffling.
        preserve_data_order: do not shuffle documents and sequences.
        min_unique_tokens: drop sequences with fewer distinct tokens.
        n_repack_epochs: passes over the documents; each pass cuts them at other places.
        treat_eot_as_text: tokenize `<|endoftext|>` as ordinary characters; otherwise it ends a document.
        normalize_with_ftfy: repair broken Unicode, NFKC.
        normalize_with_wikitext_detokenize: undo the spacing of the WikiText corpora.
    """

    seq: int = 2048
    seed: int = 0
    preserve_data_order: bool = False
    min_unique_tokens: int = 0
    n_repack_epochs: int = 1
    treat_eot_as_text: bool = False
    normalize_with_ftfy: bool = False
    normalize_with_wikitext_detokenize: bool = False

    def __post_init__(self) -> None:
        for name, least in {"seq": 1, "n_repack_epochs": 1, "min_unique_tokens": 0, "seed": 0}.items():
            if (value := getattr(self, name)) < least:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be {least} or more")
