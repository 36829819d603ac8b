"""Ray's version, and a cluster of another one."""

import platform
import socket
from importlib import metadata

import pytest

from mesh_transformer import ray_join
from mesh_transformer.errors import UserError


@pytest.mark.parametrize("version", ["2.51.2", "1.13.0"])
def test_an_old_ray_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(UserError, match=rf"^this is Ray {version}, .* Ray 2\.52 or newer is needed"):
        ray_join.check_version()


@pytest.mark.parametrize("version", ["2.52.0", "2.60.1rc1", "3.0.0.dev0"])
def test_newer_ones_are_not(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    ray_join.check_version()


def test_another_version_is_one_line_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from ray._private.utils import check_version_info

    def init(**_: object) -> None:
        check_version_info({"ray_version": "2.40.0", "python_version": "3.9.1"}, "node 10.0.0.1")

    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError) as raised:
            ray_join.join(address)
    assert str(raised.value) == (
        f"the Ray cluster at {address} has Ray 2.40.0 and Python 3.9.1, and this process has Ray {ray.__version__} and "
        f"Python {platform.python_version()}: use the same versions"
    )
