"""A request for a TPU: its checks, and its form in the API."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.slices import SliceType, check_count, counted

Tier = Literal["on-demand", "spot", "preemptible", "reserved"]
ALL_SCOPES = "https://www.googleapis.com/auth/cloud-platform"
NAME_LENGTH = 63
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z][-_a-z0-9]{0,62}")
_LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")


@dataclass(frozen=True)
class TpuRequest:
    """A request for a TPU.

    Args:
        type: type of each slice.
        queued: wait in Google's queue (a queued resource) if there is no capacity, instead of failing.
        slices: number of slices. Several slices are the nodes NAME-0, NAME-1 ... of one queued resource.
        valid_for_s: with `queued`: leave the queue after this many seconds.
        reservation: with `queued` and tier "reserved": projects/P/locations/Z/reservations/R.
        runtime_version: None: the default of the type.
        service_account: e-mail address; None: the project's default account.
        tags: network tags, for firewall rules.
        ssh_keys: public keys that may log in, as lines "user:ssh-ed25519 AAAA... comment".

    Raises:
        UserError: the API would reject a value, or two values contradict each other.
    """

    name: str
    type: SliceType
    tier: Tier = "on-demand"
    queued: bool = False
    slices: int = 1
    valid_for_s: int | None = None
    reservation: str | None = None
    runtime_version: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    external_addresses: bool = True
    service_account: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    ssh_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} is no valid name of a TPU: use at most 63 lower-case letters, digits and hyphens, with "
                "a letter at the start and no hyphen at the end"
            )
        for label, value in self.labels.items():
            if not _LABEL.fullmatch(label) or not _LABEL_VALUE.fullmatch(value):
                raise UserError(
                    f"label {label}={value}: use at most 63 lower-case letters, digits, hyphens and underscores on "
                    "each side, with a letter at the start"
                )
        if not self.queued and (self.valid_for_s is not None or self.reservation is not None):
            raise UserError(f"TPU {self.name}: --reservation and --valid-for need a queued request: add --queued")
        if self.reservation is not None and self.tier != "reserved":
            raise UserError(f"TPU {self.name}: reservation {self.reservation} needs --reserved")
        if self.queued and self.tier == "preemptible":
            raise UserError(
                f"TPU {self.name}: the queue accepts spot TPUs, not preemptible ones: use --spot instead of "
                "--preemptible"
            )
        # raises for a type that the API does not create
        self.runtime()
        self._check_slices()

    def _check_slices(self) -> None:
        check_count(self.type, self.slices)
        if self.slices > 1 and not self.queued:
            raise UserError(f"TPU {self.name}: --slices {self.slices} needs a queued request: add --queued")
        longest = f"{self.name}-{self.slices - 1}"
        if self.slices > 1 and len(longest) > NAME_LENGTH:
            raise UserError(f"{longest} is too long for the name of a slice: at most {NAME_LENGTH} characters")

    @property
    def size(self) -> str:
        """As `Tpu.size`."""
        return counted(self.type.name, self.slices)

    def runtime(self) -> str:
        """The runtime version of the request."""
        return self.runtime_version or self.type.runtime_version

    def node(self) -> dict[str, Any]:
        """The API's `Node`. Guest attributes are on, because the hosts publish their SSH keys there."""
        network = {"network": self.network, "subnetwork": self.subnetwork}
        account, keys = self.service_account, "\n".join(self.ssh_keys) or None
        return _without_none(
            accelerator_type=self.type.name,
            runtime_version=self.runtime(),
            network_config=_without_none(enable_external_ips=self.external_addresses, **network),
            labels=dict(self.labels),
            tags=list(self.tags),
            metadata=_without_none(**{"enable-guest-attributes": "TRUE", "ssh-keys": keys}),
            scheduling_config=None if self.tier == "on-demand" else {self.tier: True},
            service_account=None if account is None else {"email": account, "scope": [ALL_SCOPES]},
        )

    def queued_resource(self, parent: str) -> dict[str, Any]:
        """The API's `QueuedResource`. One node has the same name. The API names several nodes NAME-0, NAME-1 ..."""
        several = {"multislice_params": {"node_count": self.slices, "node_id_prefix": self.name}}
        names = {"node_id": self.name} if self.slices == 1 else several
        node = self.node()
        # the queued resource has the tier
        node.pop("scheduling_config", None)
        limit = self.valid_for_s
        return _without_none(
            tpu={"node_spec": [{"parent": parent, **names, "node": node}]},
            spot={} if self.tier == "spot" else None,
            guaranteed={} if self.tier == "reserved" else None,
            reservation_name=self.reservation,
            queueing_policy=None if limit is None else {"valid_until_duration": {"seconds": limit}},
        )


def _without_none(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
