"""Incremental decoding of tokens to text: whole characters only, without stop texts."""

import bisect
import functools
import sys
from collections.abc import Sequence

from mesh_transformer.data.tokens.tokenizer import UNKNOWN, Tokenizer

# how many previous tokens can change the text of a token
CONTEXT = 16


class TextStream:
    """The text of one completion, token by token.

    The parts together equal one `decode` of all tokens, cut at the stop text that starts first, or after it. They do
    not depend on how tokens divide the text, with one exception. Some tokenizers have a token for each byte of a rare
    character, and decode it differently when invalid UTF-8 follows. Text that was returned already does not change
    then.

    Args:
        tokenizer: the tokenizer of the tokens.
        stops: texts that end the completion. They must not be empty.
        min_tokens: ignore a stop text that is complete within this number of tokens.
        context: the tokens before the completion, or the last few of them. Some tokenizers drop a space at the start of
            a text; with a context the space is kept. An incomplete character at the end of the context stays
            incomplete.
        keep_stop: whether the stop text is a part of the text.
        special_names: whether special tokens have their names as texts. Else they have none.

    Raises:
        ValueError: a stop text is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        context: Sequence[int] = (),
        keep_stop: bool = False,
        special_names: bool = False,
    ):
        if "" in stops:
            raise ValueError("a stop text must have at least one character")
        self._decode = functools.partial(tokenizer.decode, special_names=special_names)
        self._stops, self._keep_stop = sorted(set(stops)), keep_stop
        self._stop_set, self._lengths = frozenset(stops), sorted(set(map(len, stops)))
        self._longest = max(self._lengths, default=0)
        self._min_tokens = min_tokens
        # Previous tokens can change the text of the next ones. So the window starts with tokens whose text is known.
        # The new text is the text of the window after theirs.
        self._window = list(context[-CONTEXT:])
        if self._decode(self._window).endswith(UNKNOWN):
            self._window = []
        # number of tokens of the window with known text, and the length of this text in characters
        self._known = len(self._window)
        self._known_length = len(self._decode(self._window))
        # the text of the remaining tokens of the window, which later tokens can change
        self._unfinished = ""
        # decoded characters of the completion, including the held ones
        self._decoded = 0
        # decoded text that may be the start of a stop text
        self._held = ""
        # start and end of the first stop text found so far; a longer one may start before it
        self._stop = sys.maxsize, sys.maxsize
        # the text returned so far
        self.text = ""
        # whether a stop text ended the completion; later tokens are ignored
        self.stopped = False
        # for each token, the index of its first character in the text, also after a stop text
        self.offsets: list[int] = []

    def push(self, token: int) -> str:
        """Add a token.

        Returns:
            The new text that later tokens cannot change. It may be empty, or the text of several tokens.
        """
        if self.stopped:
            return ""
        self.offsets.append(self._decoded + len(self._unfinished.rstrip(UNKNOWN)))
        self._window.append(token)
        self._unfinished = self._decode(self._window)[self._known_length :]
        # U+FFFD at the end may stand for the first bytes of a character
        if not self._unfinished or self._unfinished.endswith(UNKNOWN):
            return ""
        self._window = self._window[self._known :]
        self._known, self._known_length = len(self._window), len(self._decode(self._window))
        return self._release(last=False)

    def finish(self) -> str:
        """The rest of the text, after the last token. Incomplete characters become U+FFFD."""
        return self._release(last=True)

    def _release(self, *, last: bool) -> str:
        """Accept the unfinished text, and return the part of the held text that cannot become a stop text."""
        new = len(self._unfinished)
        self._decoded += new
        self._held, self._unfinished = self._held + self._unfinished, ""
        if len(self.offsets) > self._min_tokens:
            self._find_stops(new)
        end = len(self._held) if last else self._possible_stop()
        start, stop = (place - len(self.text) for place in self._stop)
        self.stopped = start <= end
        if self.stopped:
            end = stop if self._keep_stop else start
        certain = self._held[:end]
        self._held = "" if self.stopped else self._held[end:]
        self.text += certain
        return certain

    def _find_stops(self, new: int) -> None:
        """Find the stop text that starts first. A new one must end in the last `new` held characters.

        The time depends on the number of different lengths of stop texts, not on their number.
        """
        held = self._held
        places = [
            (len(self.text) + end - length, len(self.text) + end)
            for end in range(len(held) - new + 1, len(held) + 1)
            for length in self._lengths
            if length <= end and held[end - length : end] in self._stop_set
        ]
        self._stop = min([self._stop, *places])

    def _possible_stop(self) -> int:
        """The index in the held text at which a stop text may start that is still incomplete. Else the length of the
        text."""
        held = self._held
        starts = range(max(0, len(held) - self._longest + 1), len(held))
        return next((i for i in starts if self._begins_a_stop(held[i:])), len(held))

    def _begins_a_stop(self, text: str) -> bool:
        # in sorted order, stop texts with this prefix follow it directly
        at = bisect.bisect_left(self._stops, text)
        return at < len(self._stops) and self._stops[at].startswith(text)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a single token for lists of log-probabilities. Incomplete characters appear as `bytes:\\xe2\\x80`."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in raw)
