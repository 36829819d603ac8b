"""Serve a model over HTTP: OpenAI's completions API, and the original's /complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_transformer.runtime import cli

if TYPE_CHECKING:
    from mesh_transformer.runtime.serve.start import OpenEngine


def main(open_engine: OpenEngine | None = None) -> int:
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
    parser.add_argument(
        "--slots",
        type=int,
        default=8,
        metavar="N",
        help="sequences computed at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=64,
        metavar="N",
        help="sequences that may wait; further requests get status 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout-seconds",
        dest="timeout_s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds after which a request is ended (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-seconds", dest="drain_s", type=float, default=30.0, metavar="S",
        help="seconds that running requests get to finish after SIGTERM (default: %(default)s)",
    )  # fmt: skip
    arguments = parser.parse_args()
    from mesh_transformer.runtime.serve import start

    options = cli.fields(start.Options, arguments)
    return start.run(arguments.config_path, arguments.overrides, options, open_engine)


if __name__ == "__main__":
    cli.run(main)
