"""The folders of the caches of the commands."""

from __future__ import annotations

import os


def user_cache() -> str:
    """The cache folder of this user: XDG_CACHE_HOME, or ~/.cache."""
    return os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")


def own(name: str) -> str:
    """A folder of this program in the user's cache folder."""
    return os.path.join(user_cache(), "mesh-transformer", name)


def compiled_programs() -> str:
    """The folder of JAX's compiled programs: JAX_COMPILATION_CACHE_DIR, or `own("compiled")`."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR", own("compiled"))


def data_sets() -> str:
    """The folder of tokenized text files."""
    return os.path.join(user_cache(), "mesh_transformer", "datasets")


def hugging_face() -> str:
    """The folder of huggingface_hub: HF_HOME, or huggingface in the user's cache folder."""
    return os.path.expanduser(os.environ.get("HF_HOME") or os.path.join(user_cache(), "huggingface"))
