"""The versions, devices and options that decide the bits of a training step. Each checkpoint records them. A resumed
run keeps the recorded values of options with "auto", where they fit, and logs the other differences."""

import dataclasses
import functools
import os
import subprocess
from typing import Any, Self

import jax
import pydantic

from mesh_transformer import __version__, cpu_devices, environment
from mesh_transformer.checkpoint.native.source import read_manifest
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import Config
from mesh_transformer.config.mesh import named
from mesh_transformer.errors import UserError
from mesh_transformer.estimate.programs import compiler_versions
from mesh_transformer.logs import log
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend.kernels import Setting
from mesh_transformer.runtime.session.broadcast import from_first_process
from mesh_transformer.runtime.session.session import Session

# the key in the `extra` of a checkpoint
KEY = "provenance"
PACKING, ATTENTION = "data.packing", "compute.attention"
_GIT_S = 10
_SETTING: pydantic.TypeAdapter[Setting] = pydantic.TypeAdapter(str | dict[str, str])


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The versions, devices and options that, with the config and the data, decide the bits of a step."""

    # of this package, with the commit in a checkout, and of the packages that compile programs
    versions: dict[str, str]
    device: str
    # the axes of the mesh of all devices
    mesh: dict[str, int]
    processes: int
    # of the CPU client: the order of sums may depend on their number. None on GPU and TPU
    threads: int | None
    # the value of each option that is "auto", such as "compute.dtype"
    resolved: dict[str, Any]

    @classmethod
    def of(cls, session: Session, *, documents: bool | None) -> Self:
        """The provenance of the steps of a session, whose sequences have documents or not."""
        device, count = jax.devices()[0], jax.local_device_count()
        return cls(
            {"mesh-transformer": _own_version(), **compiler_versions()},
            device.device_kind,
            dict(session.shape),
            jax.process_count(),
            cpu_devices.threads(count) if device.platform == "cpu" else None,
            resolved(session, documents=documents),
        )

    @classmethod
    def read(cls, root: str) -> Self | None:
        """The provenance in the newest step under `root` whose manifest can be read; None: the step has none. All
        processes must call this function."""
        return cls.recorded(from_first_process(_newest_extra(root) if jax.process_index() == 0 else {}))

    @classmethod
    def recorded(cls, extra: dict[str, Any]) -> Self | None:
        """The provenance that a checkpoint has in `extra`; None: it is missing or has another form."""
        try:
            return pydantic.TypeAdapter(cls).validate_python(extra.get(KEY))
        except pydantic.ValidationError:
            return None

    @property
    def documents(self) -> bool:
        """Whether `data.packing` "auto" found documents in the data."""
        return self.resolved.get(PACKING) == "documents"

    def differences(self, now: Self) -> list[str]:
        """The differences between this provenance and `now`, such as `jax 0.10.2 -> 0.12.0`."""
        versions = dict.fromkeys([*self.versions, *now.versions])
        pairs = {name: (self.versions.get(name, "none"), now.versions.get(name, "none")) for name in versions}
        pairs |= {"device": (self.device, now.device), "mesh": (named(self.mesh), named(now.mesh))}
        pairs["processes"] = str(self.processes), str(now.processes)
        if self.threads is not None and now.threads is not None:
            pairs["CPU threads"] = str(self.threads), str(now.threads)
        # an option that was set before, or is set now, is a change of the config
        for option in self.resolved.keys() & now.resolved.keys():
            pairs[option] = _shown(self.resolved[option]), _shown(now.resolved[option])
        return [f"{name} {old} -> {new}" for name, (old, new) in pairs.items() if old != new]

    def to_json(self) -> dict[str, Any]:
        """The JSON value that `recorded` reads."""
        return dataclasses.asdict(self)


def resolved(session: Session, *, documents: bool | None) -> dict[str, Any]:
    """The value of each option that is "auto" in the config.

    Args:
        documents: whether the sequences have several, each with its own attention; None: it is not known yet.
    """
    config, compute = session.config, session.placement.model.compute
    values = {
        "compute.dtype": compute.dtype,
        "compute.remat": compute.remat,
        "compute.logits_mib": compute.logits_mib,
        "mesh.overlap_tp": session.placement.partition.overlap_tp,
        ATTENTION: _kernels(session, documents=documents or config.data.packing == "documents"),
    }
    if documents is not None:
        values[PACKING] = "documents" if documents else "concat"
    return {option: value for option, value in values.items() if _value(config, option) == "auto"}


def _kernels(session: Session, *, documents: bool) -> str | dict[str, str]:
    """The attention kernel of the layers; by `Case.heads` if they have several kernels."""
    placement, seq = session.placement, session.config.seq
    cases, kernels = placement.cases(seq, documents=documents), placement.kernels(seq, documents=documents)
    by_heads = {cases[kind].heads: kernel for kind, kernel in kernels.items()}
    return by_heads if len(set(by_heads.values())) > 1 else next(iter(by_heads.values()))


def keep_resolved(session: Session, config: Config, before: Provenance | None) -> Session:
    """The session with the values that options with "auto" had in a checkpoint of the same kind of device and the same
    mesh. A value that this version does not know, or cannot compute, is not kept.

    Args:
        config: the session's, with `mesh.overlap_tp` decided.
    """
    if before is None or (before.device, before.mesh) != (jax.devices()[0].device_kind, dict(session.shape)):
        return session
    for option, today in resolved(session, documents=before.documents).items():
        value = before.resolved.get(option, today)
        if option == PACKING or value in (today, None, "auto"):
            continue
        try:
            if option == ATTENTION:
                placement = session.placement.with_attention(_SETTING.validate_python(value))
                placement.kernels(config.seq, documents=before.documents)
            else:
                config, placement = _with_value(config, option, value)
        except (UserError, pydantic.ValidationError):
            continue
        session = dataclasses.replace(session, placement=placement)
        log.info(
            "%s auto stays %s, as in the checkpoint; a new run would take %s", option, _shown(value), _shown(today)
        )
    return session


def _newest_extra(root: str) -> dict[str, Any]:
    """The part of `extra` with the provenance, of the newest step whose manifest can be read.

    It raises nothing: the restore that follows explains a damaged step, and falls back to the one before it.
    """
    store = CheckpointStore(root, read_only=True)
    for step in reversed(store.steps()):
        try:
            extra = read_manifest(store.folder(step)).extra
        # as in `checkpoint.load.fail_together`: a damaged or missing file raises many types of exceptions
        except Exception as error:  # noqa: BLE001
            log.debug("step %d has no manifest that can be read: %s", step, error)
            continue
        return {KEY: extra[KEY]} if KEY in extra else {}
    return {}


def _value(config: Config, option: str) -> Any:
    group, name = option.split(".")
    return getattr(getattr(config, group), name)


def _with_value(config: Config, option: str, value: Any) -> tuple[Config, Placement]:
    """The config and its placement. Raises UserError and pydantic.ValidationError if the option cannot have the
    value."""
    group, name = option.split(".")
    fields = getattr(config, group)
    config = config.model_copy(update={group: type(fields).model_validate({**fields.model_dump(), name: value})})
    return config, Placement.of(config, jax.devices())


@functools.cache
def _own_version() -> str:
    """The version of this package; in a checkout with the commit, such as `2.0.0 (9cbe7143763e)`."""
    if not os.path.exists(os.path.join(environment.CHECKOUT, ".git")):
        return __version__
    # a lock would disturb the git that a user runs
    command = ["git", "--no-optional-locks", "-c", "safe.directory=*", "-C", environment.CHECKOUT]
    command += ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    # GIT_DIR of a hook names another repository
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True, env=variables)
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__} ({commit.stdout.strip()})"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{kernel} for heads of {heads}" for heads, kernel in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)
