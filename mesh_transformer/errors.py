"""Exceptions for bad input, which the user can correct, and for runs that fail; words for messages."""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Sequence

# those that move a terminal's cursor, end a line, or change the order of what stands beside them; a tab does not
_CONTROL = re.compile("[\0-\x08\n-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def shown(text: str) -> str:
    """A text on one line of a terminal or a log: control characters are escaped, as `\\x1b` and `\\n`.

    Names of files, members of archives, tensors and keys, and texts of other programs, come from strangers.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class EscapedError(Exception):
    """An exception whose message has a line for each argument, on which `shown` escapes control characters."""

    def __str__(self) -> str:
        return "\n".join(shown(str(argument)) for argument in self.args)


class UserError(EscapedError, ValueError):
    """Bad input: the message says what was given, what is allowed and what to change. Each argument is a line.

    Entry points print only the message and exit with code 2. Every other exception is a bug or a failure of the machine
    and is printed with its traceback.
    """


class BadDataError(UserError):
    """A file, or a place in it, that is damaged or has another format.

    Args:
        place: the file, and the byte, line or row in it where that is known.
        kind: a short reason, by which such places are counted.
        reason: what was given, what is allowed, what to change.
    """

    def __init__(self, place: str, kind: str, reason: str):
        super().__init__(place, kind, reason)
        self.place, self.kind, self.reason = place, kind, reason

    def __str__(self) -> str:
        return shown(f"{self.place}: {self.reason}")


class CredentialsError(UserError):
    """This machine has no credentials for a bucket, or the bucket refuses them. On a host of a cluster this may be
    temporary."""


class RunError(EscapedError, RuntimeError):
    """A run that cannot continue for a reason that is not a bug, such as a loss that is not finite. Each argument is a
    line.

    Entry points print only the message and exit with code 1.
    """


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that the disk or the quota is full, or that a file is too large."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        # the text of TensorStore's error
        if any(f"[os_error_code='{number}']" in str(error) for number in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_memory(error: BaseException | None) -> RunError | None:
    """The error to report for an allocation that failed, on a device or on the host. None for any other cause."""
    text = str(error)
    of_device = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    exhausted = "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    if not isinstance(error, MemoryError) and not (of_device and exhausted):
        return None
    reason = text.partition("\n")[0] or type(error).__name__
    return RunError(
        f"out of memory ({reason:.300}): in training, lower the batch, raise "
        "optimizer.gradient_accumulation_steps or use compute.remat=full; in sampling and serving, compute fewer "
        "sequences at a time (--num-samples, --slots); or use a smaller model or more devices"
    )


def did_you_mean(text: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message that suggests the known name closest to `text`, or an empty string."""
    # most commands have no mistake
    import difflib

    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(text[:100].lower(), by_lower, n=1)
    return f" (did you mean {prefix}{by_lower[close[0]]}?)" if close else ""


def options_to_add(*words: str) -> str:
    """Options for a message, as a shell reads them: pasted behind the command that printed the message, they make the
    change that it advises. tests/commands/test_advice.py pastes each."""
    return shlex.join(words)


def set_options(*assignments: str) -> str:
    """`options_to_add` of --set with each `NAME=VALUE`."""
    return options_to_add(*(word for assignment in assignments for word in ("--set", assignment)))


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names for a message: the first of them, and how many more there are."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more]) or "nothing"


def plural(count: int, noun: str, several: str = "") -> str:
    """A count for a message: `1 process`, `1,000 tokens`, `2 processes`.

    Args:
        several: the noun in the plural; empty: `noun` with an s.
    """
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def byte_size(count: int) -> str:
    """Bytes for a message, in units of 1,000 that leave at least one digit before the point: `524 kB`, `1.5 GB`."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
