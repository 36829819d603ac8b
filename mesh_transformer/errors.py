"""Exceptions that mean "the user can mend this", and "this run failed"."""

import errno

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class UserError(ValueError):
    """Bad input: the message says what was given, what is allowed and what to change.

    Entry points print the message alone and exit with code 2; every other exception is a bug or a failure
    of the machine and keeps its traceback.
    """


class CredentialsError(UserError):
    """This machine has no credentials for a bucket, or they are refused. On a host of a cluster that may pass."""


class RunError(RuntimeError):
    """A run that cannot go on for a reason that is no bug, such as a loss that is not finite.

    Entry points print the message alone and exit with code 1.
    """


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says that the disk, the user's share of it or a file is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(f"[os_error_code='{number}']" in str(error) for number in _FULL):  # as TensorStore tells it
            return True
        error = error.__cause__ or error.__context__
    return False
