"""Serve a model over HTTP, with OpenAI's APIs for completions and chats and the original's /complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mesh_transformer.runtime import cli

_REPEATED: dict[str, Any] = {"action": "append", "default": []}
# flag, help text, further arguments of add_argument
_OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("--host", "address to listen on (default: %(default)s, this machine only)", {"default": "127.0.0.1"}),
    ("--port", "port to listen on; 0: any free port (default: %(default)s)", {"type": int, "default": 5000}),
    ("--api-key-file",
     "file with one API key per line; each request must then send a key: Authorization: Bearer KEY",
     {"metavar": "FILE"}),
    ("--allow-origin",
     "web pages of this origin, such as https://example.org, may read the answers, besides pages of this machine; may "
     "be repeated; *: all pages (default: * with --api-key-file, else no others)",
     {**_REPEATED, "dest": "allow_origins", "metavar": "ORIGIN"}),
    ("--allow-host",
     "answer requests to this name or address, besides those to this machine and --host, such as the name at which a "
     "proxy is asked; may be repeated; *: all names (default: * with --api-key-file or with a --host that other "
     "machines reach, else no others)",
     {**_REPEATED, "dest": "allow_hosts", "metavar": "NAME"}),
    ("--access-log", "log a line for each answer: request ID, route, status, tokens and times, never a text",
     {"action": "store_true"}),
    ("--slots", "sequences that are computed at the same time (default: %(default)s)",
     {"type": int, "default": 8, "metavar": "N"}),
    ("--max-queue",
     "sequences that may wait in the queue; further requests get status 503 (default: %(default)s)",
     {"type": int, "default": 64, "metavar": "N"}),
    ("--timeout-seconds", "time limit of a request, in seconds (default: %(default)s)",
     {"type": float, "default": 600.0, "dest": "timeout_s", "metavar": "S"}),
    ("--drain-seconds", "time for running requests to finish after SIGTERM, in seconds (default: %(default)s)",
     {"type": float, "default": 30.0, "dest": "drain_s", "metavar": "S"}),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None, open_engine: Callable[..., Any] | None = None) -> int:
    """Parse the arguments and serve. `open_engine`, if given, opens the engine instead of the config."""
    parser = cli.parser(__doc__)
    cli.add_checkpoint(parser)
    cli.add_generation_config(parser)
    for flag, text, settings in _OPTIONS:
        parser.add_argument(flag, help=text, **settings)
    given = parser.parse_args(arguments)
    cli.starting(given.config_path, given.overrides)
    from mesh_transformer.runtime.serving import start

    options = cli.fields(start.ServeOptions, given)
    return start.run(given.config_path, given.overrides, options, open_engine)
