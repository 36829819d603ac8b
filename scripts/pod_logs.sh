#!/usr/bin/env bash
# On a host of a pod, pack our logs (logs/) and those of Ray's newest session (ray/) into one archive.
#   pod_logs.sh STATE ARCHIVE
set -euo pipefail

state=$1 archive=$2
# the head's --temp-dir (cloud/head.py), which Ray's nodes take too
ray=/tmp/ray/session_latest/logs
more=()
if [[ -d $ray ]]; then
    more=(-C / "${ray#/}/.")
fi
mkdir -p "$state/logs"
code=0
# tpu_logs: where libtpu has logs, Ray links to them by an absolute path, which the driver refuses to unpack
tar -czf "$archive" --warning=no-file-changed --exclude=tpu_logs --transform='s,^tmp/ray/session_latest/logs/\.,ray,' \
    -C "$state" logs ${more[@]+"${more[@]}"} || code=$?
# 1: a log grew while tar read it
exit $((code == 1 ? 0 : code))
