"""Serve a model over HTTP: OpenAI's completions API, and the original's /complete."""

from collections.abc import Callable
from typing import Any

from mesh_transformer.runtime import cli


def main(open_engine: Callable[..., Any] | None = None) -> int:
    """Parse the arguments and serve; `open_engine` opens another engine than the config's."""
    parser = cli.parser(__doc__)
    cli.add_checkpoint(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    parser.add_argument("--port", type=int, default=5000, help="port; 0: any free one (default: %(default)s)")
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file of keys, one on each line; a request must then send one: Authorization: Bearer KEY",
    )
    for flag, name, default, metavar, text in [
        ("--slots", "slots", 8, "N", "sequences computed at the same time"),
        ("--max-queue", "max_queue", 64, "N", "sequences that may wait; further requests get status 503"),
        ("--timeout-seconds", "timeout_s", 600.0, "S", "seconds after which a request is ended"),
        ("--drain-seconds", "drain_s", 30.0, "S", "seconds for what runs to finish after SIGTERM"),
    ]:
        described = f"{text} (default: %(default)s)"
        parser.add_argument(
            flag, dest=name, type=type(default), default=default, metavar=metavar, help=described
        )
    arguments = parser.parse_args()
    from mesh_transformer.runtime.serving import start

    options = cli.fields(start.Options, arguments)
    return start.run(arguments.config_path, arguments.overrides, options, open_engine)


if __name__ == "__main__":
    cli.run(main)
