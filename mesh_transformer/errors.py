"""The one exception that means "the user can mend this"."""

from __future__ import annotations


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
