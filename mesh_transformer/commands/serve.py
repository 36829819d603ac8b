"""Serve a model over HTTP, with OpenAI's APIs for completions and chats and the original's /complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None, open_engine: Callable[..., Any] | None = None) -> int:
    """Parse the arguments and serve. `open_engine`, if given, opens the engine instead of the config."""
    parser = cli.parser(__doc__)
    cli.add_checkpoint(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    parser.add_argument(
        "--port", type=int, default=5000, help="port to listen on; 0: any free port (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with one API key per line; each request must then send a key: Authorization: Bearer KEY",
    )
    parser.add_argument(
        "--allow-origin",
        dest="allow_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages of this origin, such as https://example.org, may read the answers, besides pages of this "
        "machine; may be repeated; *: all pages (default: * with --api-key-file, else no others)",
    )
    parser.add_argument(
        "--allow-host",
        dest="allow_hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="answer requests to this name or address, besides those to this machine and --host, such as the name at "
        "which a proxy is asked; may be repeated; *: all names (default: * with --api-key-file or with a --host that "
        "other machines reach, else no others)",
    )
    for flag, name, default, metavar, text in [
        ("--slots", "slots", 8, "N", "sequences that are computed at the same time"),
        (
            "--max-queue",
            "max_queue",
            64,
            "N",
            "sequences that may wait in the queue; further requests get status 503",
        ),
        ("--timeout-seconds", "timeout_s", 600.0, "S", "time limit of a request, in seconds"),
        (
            "--drain-seconds",
            "drain_s",
            30.0,
            "S",
            "time for running requests to finish after SIGTERM, in seconds",
        ),
    ]:
        described = f"{text} (default: %(default)s)"
        parser.add_argument(flag, dest=name, type=type(default), default=default, metavar=metavar, help=described)
    given = parser.parse_args(arguments)
    cli.starting()
    from mesh_transformer.runtime.serving import start

    options = cli.fields(start.ServeOptions, given)
    return start.run(given.config_path, given.overrides, options, open_engine)
