"""The table of checks, and the report."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping

from mesh_transformer.doctor import accelerators, credentials, machine, network, packages, settings
from mesh_transformer.doctor.devices import devices
from mesh_transformer.doctor.findings import Check, Finding, warning

# variables whose values are secret
_SECRET = re.compile(r"(?i).*(token|key|secret|password)s?(_id)?")
# user and password in an address, such as that of a proxy
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
# shorter values, such as 1, are parts of other words
_LEAST_SECRET = 6


def checks(wait_s: float, *, online: bool) -> dict[str, Check]:
    """The checks by name, from the machine to the cloud.

    Args:
        wait_s: seconds to wait for JAX's devices.
        online: ask the services over the network too.
    """
    table: dict[str, Check] = {
        "python": machine.python,
        "memory": machine.memory,
        "cores": machine.cores,
        "folders": machine.folders,
        "ports": machine.ports,
        "packages": packages.requirements,
        "dependencies": packages.dependencies,
        "jax plugins": packages.jax_plugins,
        "settings": settings.settings,
        "nvidia": accelerators.nvidia,
        "tpu": accelerators.tpu,
        "devices": functools.partial(devices, wait_s),
        "hugging face": credentials.hugging_face,
        "wandb": credentials.wandb,
        "aws": credentials.aws,
        "google": credentials.google,
        "pods": credentials.pods,
    }
    return {**table, "network": network.network} if online else table


def report(table: Mapping[str, Check]) -> Iterator[tuple[str, Finding]]:
    """The findings of all checks, with the names of the checks. A check that fails itself is a warning."""
    for name, check in table.items():
        try:
            for finding in check():
                yield name, _without_secrets(finding)
        # on a broken machine anything may fail, and the other checks still help
        except Exception as error:  # noqa: BLE001
            failed = f"this check failed: {type(error).__name__}: {error}"
            yield (
                name,
                _without_secrets(warning(failed, "mend the other lines first; if this one stays, tell the developers")),
            )


def _without_secrets(finding: Finding) -> Finding:
    """The finding without the values of secret variables and logins in addresses, should a program or an error have
    printed one."""
    finding = Finding(finding.level, *(_LOGIN.sub("", text) for text in finding[1:]))
    for name, value in os.environ.items():
        # the value of a variable such as SSH_KEY may be the name of a file, which the reader needs
        if _SECRET.fullmatch(name) and len(value) >= _LEAST_SECRET and not os.path.exists(value):
            finding = Finding(finding.level, *(text.replace(value, f"<{name}>") for text in finding[1:]))
    return finding
