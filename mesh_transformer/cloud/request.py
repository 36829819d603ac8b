"""What TPU is wanted, checked before the API sees it, and how that is said in the API's words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mesh_transformer import slices
from mesh_transformer.errors import UserError

Tier = Literal["on-demand", "spot", "preemptible", "reserved"]
ALL_SCOPES = "https://www.googleapis.com/auth/cloud-platform"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z][-_a-z0-9]{0,62}")
_LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")


@dataclass(frozen=True)
class Request:
    """One TPU slice to have.

    Raises:
        UserError: a value that the API would refuse, or that does not go with another.
    """

    name: str
    type: slices.SliceType
    tier: Tier = "on-demand"
    # wait in Google's queue (a queued resource) rather than fail when there is no capacity
    queued: bool = False
    valid_for_s: int | None = None  # with queued: give up the place in the queue after so many seconds
    reservation: str | None = None  # with queued and reserved: projects/P/locations/Z/reservations/R
    runtime_version: str | None = None  # None: what suits the type
    network: str | None = None
    subnetwork: str | None = None
    external_addresses: bool = True
    service_account: str | None = None  # e-mail; None: the project's default
    labels: Mapping[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()  # network tags, for firewall rules
    ssh_keys: tuple[str, ...] = ()  # lines "user:ssh-ed25519 AAAA... comment" that may log in

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} cannot name a TPU: up to 63 lower-case letters, digits and hyphens, first a letter, last "
                "no hyphen"
            )
        for label, value in self.labels.items():
            if not _LABEL.fullmatch(label) or not _LABEL_VALUE.fullmatch(value):
                raise UserError(
                    f"label {label}={value}: both sides take lower-case letters, digits, hyphens and underscores, up to "
                    "63; the left one begins with a letter"
                )
        if not self.queued and (self.valid_for_s is not None or self.reservation is not None):
            raise UserError(
                f"TPU {self.name}: a reservation's name and a limit on waiting need a place in the queue: add --queued"
            )
        if self.reservation is not None and self.tier != "reserved":
            raise UserError(f"TPU {self.name}: reservation {self.reservation} needs --reserved")
        if self.queued and self.tier == "preemptible":
            raise UserError(f"TPU {self.name}: the queue takes spot TPUs, not preemptible ones: use --spot")
        self.runtime()  # a type that the API does not make

    def runtime(self) -> str:
        """The runtime version to ask for."""
        return self.runtime_version or self.type.runtime_version

    def node(self) -> dict[str, Any]:
        """The API's `Node`. Guest attributes are on: the hosts publish their SSH keys there."""
        network = {"network": self.network, "subnetwork": self.subnetwork}
        account, keys = self.service_account, "\n".join(self.ssh_keys) or None
        return _given(
            accelerator_type=self.type.name,
            runtime_version=self.runtime(),
            network_config=_given(enable_external_ips=self.external_addresses, **network),
            labels=dict(self.labels),
            tags=list(self.tags),
            metadata=_given(**{"enable-guest-attributes": "TRUE", "ssh-keys": keys}),
            scheduling_config=None if self.tier == "on-demand" else {self.tier: True},
            service_account=None if account is None else {"email": account, "scope": [ALL_SCOPES]},
        )

    def queued_resource(self, parent: str) -> dict[str, Any]:
        """The API's `QueuedResource` of one node, which has the queued resource's own name."""
        node = self.node()
        node.pop("scheduling_config", None)  # the tier is said once, outside
        limit = self.valid_for_s
        return _given(
            tpu={"node_spec": [{"parent": parent, "node_id": self.name, "node": node}]},
            spot={} if self.tier == "spot" else None,
            guaranteed={} if self.tier == "reserved" else None,
            reservation_name=self.reservation,
            queueing_policy=None if limit is None else {"valid_until_duration": {"seconds": limit}},
        )


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
