#!/usr/bin/env bash
# The steps of the image, for a fresh Debian with Python. The Dockerfile runs them, and scripts/image_check.sh runs the same.
#   install.sh packages cpu|tpu|cuda CHECKOUT    the environment of Python, in /opt/mesh-transformer
#   install.sh system                            programs of Debian, the user and its PATH
set -euo pipefail

place=/opt/mesh-transformer

packages() {
    local target=$1 checkout=$2 extras=eval,fast
    case $target in
    cpu) ;;
    tpu | cuda) extras=$target,$extras ;;
    *)
        echo "error: TARGET $target: must be cpu, tpu or cuda" >&2
        exit 2
        ;;
    esac
    python3 -m venv "$place"
    # the head of a Ray cluster needs ray[default] to take jobs; requirements.txt has Ray's version
    "$place/bin/pip" install --no-cache-dir "${checkout}[$extras]" "ray[default]"
    # the image installs nothing later
    "$place/bin/pip" uninstall --quiet --yes pip
}

system() {
    apt-get update
    # KubeRay's probes, and the image's own, call wget
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends ca-certificates wget
    rm -rf /var/lib/apt/lists/*
    useradd --uid 1000 --create-home --shell /bin/bash mesh
    # volumes at these places have their owner: runs and models, compiled programs
    install --directory --owner=mesh --group=mesh /data /home/mesh/.cache
    # KubeRay starts Ray in a login shell, which does not take the PATH of the image
    echo "export PATH=$place/bin:\$PATH" >/etc/profile.d/mesh-transformer.sh
}

"$@"
