#!/usr/bin/env bash
# On a host of a pod, pack our logs (logs/) and those of Ray's newest session (ray/) into one archive.
#   pod_logs.sh STATE ARCHIVE
set -euo pipefail

state=$1 archive=$2
mkdir -p "$state/logs"
more=()
# pod_ray.sh has asked Ray for its folder
if folder=$(cat "$state/ray.folder" 2>/dev/null) && [[ -d $folder/session_latest/logs ]]; then
    ray=$folder/session_latest/logs
    more=(-C / --transform="s,^${ray#/}/\.,ray," "${ray#/}/.")
fi
code=0
# tpu_logs: where libtpu has logs, Ray links to them by an absolute path, which the driver refuses to unpack
tar -czf "$archive" --warning=no-file-changed --exclude=tpu_logs -C "$state" logs ${more[@]+"${more[@]}"} || code=$?
# 1: a log grew while tar read it
exit $((code == 1 ? 0 : code))
