"""Say what this machine has and lacks for the commands: each fault in one line, with its mend. Exit code 1 if there is
a problem."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks and print what they find."""
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print each line as a JSON object")
    parser.add_argument(
        "--online", action="store_true", help="ask the services too; without it nothing uses the network"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60,
        metavar="S",
        help="seconds to wait for JAX to open its devices (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    from mesh_transformer.doctor import checks, findings

    code = 0
    for name, finding in checks.report(checks.checks(options.timeout, online=options.online)):
        code |= finding.level == findings.PROBLEM
        if options.json:
            line = json.dumps({"check": name, **finding._asdict()})
        else:
            mend = "if needed" if finding.level == findings.OK else "mend"
            line = f"{finding.level:8} {name}: {finding.found}" + f"; {mend}: {finding.mend}" * bool(finding.mend)
        sys.stdout.write(line + "\n")
        # a later check may wait for a driver
        sys.stdout.flush()
    return code
