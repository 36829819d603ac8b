"""The chat template of a new tokenizer: one that comes with the package, or a file."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from mesh_transformer.data.chat.template import ChatTemplate
from mesh_transformer.data.tokens.byte_tokenizer import EOT_TEXT
from mesh_transformer.data.tokens.tokenizer import MAX_TEMPLATE_CHARS
from mesh_transformer.errors import UserError, did_you_mean

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")
_NAME = re.compile(r"<\|[^|<>\s]{1,90}\|>")
# an answer that stands nowhere in a template
_ANSWER = "7f3c answer 7f3c"


class NewTemplate(NamedTuple):
    """A chat template that was tried on a chat.

    Args:
        source: the template, in Jinja.
        special: the names of the form <|name|> in it, and in what it writes of the chat: special tokens.
        end: the name after an answer, which ends it; <|endoftext|> if there is no other.
    """

    source: str
    special: tuple[str, ...]
    end: str


def names() -> list[str]:
    """The names of the templates that come with the package."""
    return sorted(file.removesuffix(".jinja") for file in os.listdir(_FOLDER) if file.endswith(".jinja"))


def find(given: str) -> NewTemplate:
    """The template of this name, or in this file.

    Raises:
        UserError: there is no such name and no such file, it is too long, or it fails.
    """
    path = os.path.join(_FOLDER, f"{given}.jinja") if given in names() else given
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(
            f"--chat-template {given}: {reason}: give {' or '.join(names())}, or a file with a template in Jinja"
            f"{did_you_mean(given, names())}"
        ) from error
    if len(source) > MAX_TEMPLATE_CHARS:
        raise UserError(f"--chat-template {given}: a template has at most {MAX_TEMPLATE_CHARS} characters")
    template = ChatTemplate(source, {"eos_token": EOT_TEXT})
    try:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        text = template.render(chat, add_generation_prompt=False)
        if _ANSWER not in text or text == template.render(chat[:1], add_generation_prompt=False):
            raise UserError("it does not write what the assistant says")
    except UserError as error:
        raise UserError(f"--chat-template {given}: {error}") from error
    finally:
        template.close()
    # a template may put a name together, as of a role
    special = tuple(name for name in dict.fromkeys(_NAME.findall(source + text)) if name != EOT_TEXT)
    after = _NAME.match(text.rpartition(_ANSWER)[2].lstrip())
    return NewTemplate(source, special, after[0] if after else EOT_TEXT)
