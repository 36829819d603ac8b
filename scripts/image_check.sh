#!/usr/bin/env bash
# Run the steps of the image without Docker, in a fresh Debian in a folder, and use its commands there as the image's
# user: scripts/image_check.sh [FOLDER], as root, with mmdebstrap and iproute2. It takes minutes, 3 GB of disk and, for the
# installation only, the network.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
certificates=/etc/ssl/certs/ca-certificates.crt

debian() {
    local root=$1
    [[ $(cat "$checkout/Dockerfile") =~ BASE=python:[0-9.]+-slim-([a-z]+) ]]
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates "${BASH_REMATCH[1]}" "$root"
}

mounts() {
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
}

# as the Dockerfile does
image() {
    local root=$1 context settings
    mounts "$root"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    mount --bind "$certificates" "$root$certificates"
    # the network of the caller, and no other variable
    mapfile -t settings < <(env | grep -iE '^(https?|no)_proxy=|^PIP_(INDEX_URL|DEFAULT_TIMEOUT)=' || true)
    settings+=(PATH=/usr/sbin:/usr/bin:/sbin:/bin "PIP_CERT=$certificates")
    # what .dockerignore lets through
    mapfile -t context < <(sed -n 's/^!//p' "$checkout/.dockerignore")
    mkdir "$root/checkout"
    git -C "$checkout" ls-files -z --cached --others --exclude-standard -- "${context[@]}" |
        tar --create --directory="$checkout" --null --files-from=- | tar --extract --directory="$root/checkout"
    env -i "${settings[@]}" /usr/sbin/chroot "$root" /checkout/deploy/install.sh packages cpu /checkout
    cp --recursive "$root/checkout/deploy" "$root/opt/deploy"
    # the last stage has no checkout
    rm -r "$root/checkout"
    env -i "${settings[@]}" /usr/sbin/chroot "$root" /opt/deploy/install.sh system
}

train_and_evaluate() {
    "${in_image[@]}" 'id --user --name && python --version && mesh-transformer --version'
    # the user cannot change the programs
    "${in_image[@]}" '! touch /opt/mesh-transformer/bin/python'
    "${in_image[@]}" 'mesh-transformer train --config tiny_shakespeare --set optimizer.total_steps=20 --set data.val_batches=1'
    "${in_image[@]}" 'mesh-transformer sample --ckpt runs/tiny_shakespeare --prompt "First Citizen:" --max-new-tokens 8'
    # the example of docs/evaluate.md
    cat >"$root/data/bottles.yaml" <<'TASK'
task: bottles
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
TASK
    cat >"$root/data/questions.jsonl" <<'QUESTIONS'
{"text": "99 bottles", "choices": [" of beer", " of wine"], "answer": 0}
{"text": "To be, or not to be: that is the", "choices": [" question", " wine"], "answer": 0}
QUESTIONS
    "${in_image[@]}" 'mesh-transformer evaluate --ckpt runs/tiny_shakespeare --tasks bottles --include-path .'
}

serve() {
    local server refused=0 second
    head -c 24 /dev/urandom | base64 >"$root/data/api_key"
    chown 1000:1000 "$root/data/api_key"
    chmod 600 "$root/data/api_key"
    "${in_image[@]}" 'exec mesh-transformer serve --ckpt runs/tiny_shakespeare --host 0.0.0.0 --api-key-file api_key' &
    server=$!
    # the shell has become the server
    until grep --quiet --null-data --line-regexp serve "$root/proc/$server/cmdline"; do sleep 0.1; done
    for ((second = 0; second < 180; second++)); do
        if "${in_image[@]}" "/opt/deploy/health.sh $server"; then break; fi
        sleep 1
    done
    ask || refused=$?
    # what wget returns for the status 401
    ((refused == 6)) || { echo "error: without a key wget returns $refused" >&2; exit 1; }
    ask --header="Authorization: Bearer $(cat "$root/data/api_key")"
    kill "$server"
    wait "$server"
}

ask() {
    local body='{"prompt": "First Citizen:", "max_tokens": 8, "temperature": 0}'
    /usr/sbin/chroot "$root" wget --quiet --output-document=- --header='Content-Type: application/json' "$@" \
        --post-data="$body" http://127.0.0.1:5000/v1/completions && echo
}

# what KubeRay does with deploy/kuberay/rayjob-cpu.yaml, with one host and few steps
drive() {
    local entrypoint token
    entrypoint=$(sed -n '/entrypoint: >-/,/shutdown/{//!p}' "$root/opt/deploy/kuberay/rayjob-cpu.yaml" | tr -s '\n ' ' ')
    token="export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(head -c 24 /dev/urandom | base64 | tr -d '/+')"
    "${in_image[@]}" "$token && ray start --head --disable-usage-stats --node-ip-address=127.0.0.1 --num-cpus=0"
    "${in_image[@]}" "$token && ray start --address=127.0.0.1:6379 --resources='{\"tpu_worker_0\": 1}'"
    "${in_image[@]}" "$token && ray job submit --address http://127.0.0.1:8265 -- $entrypoint \
        --set optimizer.total_steps=4 --set data.val_batches=1"
    test -d "$root/data/runs/tiny_shakespeare/step_4"
    "${in_image[@]}" 'ray stop'
}

use() {
    mounts "$root"
    # as the image's user, in a login shell, as KubeRay starts Ray
    in_image=(env -i HOME=/home/mesh JAX_PLATFORMS=cpu /usr/sbin/chroot --userspec=mesh:mesh "$root")
    # shellcheck disable=SC2016  # expanded in the image
    in_image+=(bash -l -c 'cd /data && eval "$0"')
    # nothing but this check, and no other machine
    ip link set lo up
    mount -t tmpfs tmpfs "$root/dev/shm"
    echo "== train, sample, evaluate"
    train_and_evaluate
    echo "== serve, with a key"
    serve
    echo "== drive, on a Ray cluster"
    rm -r "$root/data/runs"
    drive
    echo "== all passed"
}

# the mounts and processes of a part end with it
isolated=(unshare --mount --pid --fork --kill-child)
case $#:${1:-} in
0:)
    root=$(mktemp -d)
    trap 'rm -rf --one-file-system "$root"' EXIT
    chmod 755 "$root"
    "$0" "$root"
    ;;
1:*)
    debian "$1"
    "${isolated[@]}" "$0" image "$1"
    "${isolated[@]}" --net "$0" use "$1"
    ;;
2:image | 2:use)
    root=$2
    "$1" "$2"
    ;;
esac
