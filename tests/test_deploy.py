"""The files of deploy/ and the Dockerfile. scripts/image_check.sh runs the image's steps."""

import configparser
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config
from support.served import serve

from mesh_transformer import commands
from mesh_transformer.cluster.backends.ray_cluster import RESOURCE
from mesh_transformer.cluster.driver import commands as driver
from mesh_transformer.commands import serve as serve_command
from mesh_transformer.config import load_config
from mesh_transformer.runtime import cli
from mesh_transformer.runtime.serving import start
from mesh_transformer.runtime.training import trainer

KUBERAY = Path(__file__).parents[1] / "deploy/kuberay"
MANIFESTS = [(path.name, each) for path in sorted(KUBERAY.glob("*.yaml")) for each in yaml.safe_load_all(path.open())]
CLUSTERS = {
    name: each["spec"].get("rayClusterSpec", each["spec"])
    for name, each in MANIFESTS
    if each["kind"] == "RayCluster" or "rayClusterSpec" in each["spec"]
}
JOBS = {name: each["spec"] for name, each in MANIFESTS if each["kind"] == "RayJob"}


def groups(cluster: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield cluster["headGroupSpec"]
    yield from cluster["workerGroupSpecs"]


def test_what_kubernetes_itself_reads_fits_its_schema() -> None:
    """The resources of KubeRay have no schema in a package, except for their pods."""
    found = [each for _, each in MANIFESTS if not each["apiVersion"].startswith("ray.io/")]
    for cluster in CLUSTERS.values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        found += [{**pod, "template": group["template"]} for group in groups(cluster)]
    assert len(found) == 2 + 2 + 3
    for each in found:
        # strict: no unknown field
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_ray_finds_the_hosts_of_a_cluster() -> None:
    """With Ray's own reader of the resource RayCluster."""
    read = {
        name: autoscaling_config._generate_available_node_types_from_ray_cr_spec(each)
        for name, each in CLUSTERS.items()
    }
    for hosts in read.values():
        assert hosts["headgroup"]["resources"]["CPU"] == 0
    slice_ = read["raycluster.yaml"]["slice"]
    assert (slice_["min_workers"], slice_["max_workers"]) == (4, 4)
    assert slice_["resources"].items() >= {"TPU": 4, "TPU-v6e-16-head": 1}.items()
    numbered = [hosts for name, hosts in read["rayjob-cpu.yaml"].items() if name != "headgroup"]
    assert [host["max_workers"] for host in numbered] == [1, 1]
    assert all(host["resources"][f"{RESOURCE}{number}"] == 1 for number, host in enumerate(numbered))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_starts_the_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(driver, "train", given.append)
    program, *words = shlex.split(JOBS[name]["entrypoint"])
    monkeypatch.setattr(sys, "argv", [program])
    commands.main(words)
    (options,) = given
    assert (program, options.ray_address) == ("mesh-transformer", "auto")
    # its pods have the label that networkpolicy.yaml and, for a job on a cluster, clusterSelector name
    if "clusterSelector" in JOBS[name]:
        names = {each["metadata"]["name"] for _, each in MANIFESTS if each["kind"] == "RayCluster"}
        assert set(JOBS[name]["clusterSelector"].values()) == names
    else:
        assert load_config(options.config_path, options.overrides).checkpoint.root.startswith("/data/")


def test_only_the_cluster_reaches_its_pods() -> None:
    (policy,) = (each["spec"] for _, each in MANIFESTS if each["kind"] == "NetworkPolicy")
    labels = policy["podSelector"]["matchLabels"]
    assert policy["ingress"][0] == {"from": [{"podSelector": {"matchLabels": labels}}]}
    for cluster in CLUSTERS.values():
        assert cluster["authOptions"] == {"mode": "token"}
        assert all(group["template"]["metadata"]["labels"] == labels for group in groups(cluster))


def test_compose_publishes_the_proxy_alone(repo: Path) -> None:
    path = repo / "deploy/compose.yaml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    compose = yaml.safe_load(path.read_text())
    server, proxy = compose["services"]["server"], compose["services"]["proxy"]
    assert "ports" not in server
    assert "443:443" in proxy["ports"]
    (secret,) = server["secrets"]
    assert f"--api-key-file=/run/secrets/{secret}" in server["command"]
    assert secret in compose["secrets"]


def test_the_context_of_the_image_has_what_the_package_is_built_from(repo: Path) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], "requirements.txt", "README.md", "LICENSE", "pyproject.toml"}
    ignored = (repo / ".dockerignore").read_text()
    context = re.findall(r"^!(.+)$", ignored, re.MULTILINE)
    assert not {path for path in needed if not any(kept == path or kept.startswith(f"{path}/") for kept in context)}
    assert "\n*\n" in ignored


def test_the_check_runs_the_steps_of_the_dockerfile(repo: Path) -> None:
    steps = re.findall(r"^RUN (.+)$", (repo / "Dockerfile").read_text(), re.MULTILINE)
    assert steps == [
        '/checkout/deploy/install.sh packages "${TARGET}" /checkout',
        "/opt/deploy/install.sh system",
    ]
    check = (repo / "scripts/image_check.sh").read_text()
    assert [check.count(step.replace('"${TARGET}"', "cpu")) for step in steps] == [1, 1]


DEPLOY = KUBERAY.parent


def test_the_deployment_fits_its_schema_and_its_server() -> None:
    manifests = list(yaml.safe_load_all((DEPLOY / "kubernetes/server.yaml").open()))
    for each in manifests:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    deployment, service = manifests
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    given = options_of(container["args"][1:])
    assert container["args"][0] == "serve"
    # an address of the pod, so that keys are needed
    assert (given.host, given.port, given.access_log) == ("0.0.0.0", container["ports"][0]["containerPort"], True)
    assert given.api_key_file
    assert pod["spec"]["terminationGracePeriodSeconds"] == given.drain_s + 10
    # a pod that warms up or drains answers its probe of life
    assert container["livenessProbe"]["httpGet"]["path"] != "/health"
    assert container["startupProbe"]["httpGet"]["path"] == "/health"


def test_the_unit_of_a_server_fits_its_command() -> None:
    service = read_unit("mesh-transformer.service")
    words = shlex.split(service["ExecStart"])
    assert words[0].endswith("/mesh-transformer")
    assert words[1] == "serve"
    given = options_of(words[2:])
    assert int(service["TimeoutStopSec"]) == given.drain_s + 10
    assert service["LoadCredential"].startswith(f"{given.api_key_file.removeprefix('%d/')}:")


def test_the_unit_of_a_run_fits_its_command() -> None:
    service = read_unit("mesh-transformer-train@.service")
    words = shlex.split(service["ExecStart"])
    assert words[0].endswith("/mesh-transformer")
    with mock.patch.object(cli, "starting"), mock.patch.object(trainer, "run", return_value=0) as run:
        commands.run(words[1], words[2:])
    assert run.call_args.args == ("%i.json", [], None, False, None)
    # SIGTERM, after the save
    assert int(service["SuccessExitStatus"]) == 128 + signal.SIGTERM


def read_unit(name: str) -> configparser.SectionProxy:
    """The section Service of a unit. systemd checks it where it is installed."""
    path = DEPLOY / name
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
        # the program is not installed here
        assert [line for line in done.stderr.splitlines() if "is not executable" not in line] == []
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    return unit["Service"]


def options_of(arguments: list[str]) -> start.ServeOptions:
    """The options that `serve` takes from a command line."""
    with mock.patch.object(start, "run", return_value=0) as run:
        serve_command.main(arguments)
    return run.call_args.args[2]


def test_dashboard_and_alerts_name_metrics_of_the_server() -> None:
    with serve() as server:
        server.complete("a")
        server.client.get("/health")
        text = server.client.get("/metrics").text
    names = {line.split("{")[0].split()[0] for line in text.splitlines() if not line.startswith("#")}
    rules = yaml.safe_load((DEPLOY / "monitoring/alerts.yaml").read_text())["groups"][0]["rules"]
    dashboard = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [each["query"] for each in dashboard["templating"]["list"]]
    asked = {name for text in expressions for name in re.findall(r"\b(?:mesh_transformer|process)_\w+", text)}
    assert len(rules) == 4
    assert len(asked) >= 12
    assert asked <= names
    labels = {label for text in expressions for label in re.findall(r"(\w+)=~?\"", text)}
    assert labels <= {"status", "instance"}
