"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

import bisect
import sys
from collections.abc import Sequence

from mesh_transformer.data.tokenizer import UNKNOWN, Tokenizer

CONTEXT = 16  # tokens before the first that may decide how it reads


class TextStream:
    """The text of one completion, piece by piece.

    The pieces joined are what one `decode` of all tokens gives, cut at the earliest stop: of all stops' first occurrences
    the one that begins first. How tokens divide the text makes no difference. One exception: tokenizers that spell rare
    characters as tokens of one byte each decode such a token to another text when broken UTF-8 follows it; what was given by
    then stays.

    Args:
        tokenizer: that of the tokens.
        stops: texts that end the completion; none of them empty.
        min_tokens: a stop whose last character comes with one of the first so many tokens is no stop.
        context: the tokens before the first, or the last few of them. Some tokenizers drop a space where a text begins;
            with a context it stays. A character that the context leaves unfinished is not finished.

    Raises:
        ValueError: a stop is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        context: Sequence[int] = (),
    ):
        if "" in stops:
            raise ValueError("a stop string must have at least one character")
        self._tokenizer, self._stops = tokenizer, sorted(set(stops))
        self._whole, self._lengths = frozenset(stops), sorted(set(map(len, stops)))
        self._longest = max(self._lengths, default=0)
        self._min_tokens = min_tokens
        # Tokens that end a text decide what the next ones look like; so the window has some whose text is known
        # already, and the new text is what the window's has beyond theirs.
        self._window = list(context[-CONTEXT:])
        if tokenizer.decode(self._window).endswith(UNKNOWN):
            self._window = []
        self._known = len(self._window)  # so many of the window's tokens
        self._known_length = len(tokenizer.decode(self._window))  # characters
        self._unfinished = ""  # the text of the window's other tokens, which later ones may change
        self._decoded = 0  # characters of the completion, those held included
        self._held = ""  # decoded, but perhaps a stop
        # where in the completion the first stop so far begins: a longer one may begin before it
        self._found = sys.maxsize
        self.text = ""  # what was given
        self.stopped = False  # by a stop string; tokens pushed later count for nothing
        # of each token, where in the text its first character is; beyond a stop too
        self.offsets: list[int] = []

    def push(self, token: int) -> str:
        """Add a token.

        Returns:
            the text that is certain now; often none, or that of several tokens.
        """
        if self.stopped:
            return ""
        self.offsets.append(self._decoded + len(self._unfinished.rstrip(UNKNOWN)))
        self._window.append(token)
        self._unfinished = self._tokenizer.decode(self._window)[self._known_length :]
        # U+FFFD at the end may be the first bytes of a character
        if not self._unfinished or self._unfinished.endswith(UNKNOWN):
            return ""
        self._window = self._window[self._known :]
        self._known, self._known_length = len(self._window), len(self._tokenizer.decode(self._window))
        return self._give(last=False)

    def finish(self) -> str:
        """The rest of the text, when no token follows; bytes that are no character become U+FFFD."""
        return self._give(last=True)

    def _give(self, *, last: bool) -> str:
        """Take the unfinished text as it is, and give what of the held text cannot become a stop."""
        new = len(self._unfinished)
        self._decoded += new
        self._held, self._unfinished = self._held + self._unfinished, ""
        if len(self.offsets) > self._min_tokens:
            self._find_stops(new)
        end = len(self._held) if last else self._possible_stop()
        at = self._found - len(self.text)
        self.stopped = at <= end
        given = self._held[: min(at, end)]
        self._held = "" if self.stopped else self._held[end:]
        self.text += given
        return given

    def _find_stops(self, new: int) -> None:
        """Note the stop that begins first. Only the last `new` held characters can end one that was not seen before.

        The time depends on how many different lengths the stops have, not on how many they are.
        """
        held = self._held
        found = [
            len(self.text) + end - length
            for end in range(len(held) - new + 1, len(held) + 1)
            for length in self._lengths
            if length <= end and held[end - length : end] in self._whole
        ]
        self._found = min([self._found, *found])

    def _possible_stop(self) -> int:
        """Where in the held text a stop begins that its end may be a part of; its length if there is none."""
        held = self._held
        starts = range(max(0, len(held) - self._longest + 1), len(held))
        return next((i for i in starts if self._begins_a_stop(held[i:])), len(held))

    def _begins_a_stop(self, text: str) -> bool:
        # those that begin with a text stand behind it in this order
        at = bisect.bisect_left(self._stops, text)
        return at < len(self._stops) and self._stops[at].startswith(text)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself, as lists of log-probabilities show it; `bytes:\\xe2\\x80` if it is no whole characters."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in raw)
