#!/usr/bin/env bash
# Supervise one Ray node on this machine, independent of the SSH connection that starts it.
#   pod_ray.sh start STATE FINGERPRINT COMMAND...   COMMAND is `ray start ...`; no effect if the same one runs
#   pod_ray.sh stop STATE
#   pod_ray.sh status STATE                         exit code 0 if the node runs
# STATE is a folder with the supervisor's process id, the fingerprint of its command, the folder of Ray's sessions and its
# log. The supervisor leads a session of its own, and restarts the node when it ends. Before a node stops, the workers of
# runs on it get SIGTERM and SAVE_S seconds to save and exit.
set -euo pipefail

READY_LINE="Ray runtime started"
ENDED_LINE="ray ended with code"
# Ray gives a node 30 s, whatever one sets; a busy host took 90 s to notice that they had passed
BUSY_LINE="The current node timed out during startup"
SAVED="the worker of a run has saved and exited"
UNSAVED="the worker of a run was asked to save, and has not exited"
# three starts of such a host
READY_S=270
STOP_S=15
SAVE_S=${MESH_TRANSFORMER_SAVE_S:-120}
WORKER="mesh_transformer.cluster.host.worker"

verb=$1 state=$2
shift 2
mkdir -p "$state/logs"
log=$state/logs/ray.log

# identifies this boot: process ids from before a reboot belong to other processes
boot() {
    echo "$(cat /proc/sys/kernel/random/boot_id)-$(awk '{print $22}' /proc/1/stat)"
}

# the process id of the supervisor, if it was started in this boot
supervisor() {
    local pid booted
    read -r pid booted 2>/dev/null <"$state/ray.pid" && [[ $booted == "$(boot)" ]] && echo "$pid"
}

# whether that process is our supervisor, and not another one that got its id later
running() {
    local pid
    pid=$(supervisor) && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF "pod_ray.sh supervise $state "
}

session_processes() {
    ps -o pid= -s "$1" 2>/dev/null || true
}

# the workers of runs; agents on this node start each of them in a session of its own
workers() {
    ps -eww -o pid=,ppid=,args= | awk -v ours=" $(session_processes "$1" | xargs) " -v name="$WORKER" \
        'index($0, name) && index(ours, " " $2 " ") { print $1 }'
}

# ask workers to save and wait for them; all hosts of a run do this at the same time, so that they agree on the step
save_workers() {
    local pid left deadline=$((SECONDS + SAVE_S))
    left=$(workers "$1")
    [[ -z $left ]] && return
    # shellcheck disable=SC2086
    kill -TERM $left 2>/dev/null || true
    for pid in $left; do
        while kill -0 "$pid" 2>/dev/null && [[ " $(workers "$1" | xargs) " == *" $pid "* ]]; do
            if ((SECONDS >= deadline)); then
                echo "$UNSAVED after $SAVE_S s"
                return
            fi
            sleep 0.1
        done
    done
    echo "$SAVED"
}

stop() {
    local pid deadline
    if ! pid=$(supervisor); then
        rm -f "$state/ray.pid" "$state/ray.fingerprint"
        return
    fi
    if running; then
        save_workers "$pid"
        kill -TERM "$pid" 2>/dev/null || true
        deadline=$((SECONDS + STOP_S))
        while [[ -n $(session_processes "$pid") && $SECONDS -lt $deadline ]]; do
            sleep 0.1
        done
    # another process that got the id later: leave its session alone
    elif [[ -e /proc/$pid ]]; then
        rm -f "$state/ray.pid" "$state/ray.fingerprint"
        return
    fi
    # shellcheck disable=SC2046
    kill -9 $(session_processes "$pid") 2>/dev/null || true
    rm -f "$state/ray.pid" "$state/ray.fingerprint"
}

# whether a start in this output failed, and not because the host is busy
failed() {
    (($(grep -c "$ENDED_LINE" <<<"$1") > $(grep -c "$BUSY_LINE" <<<"$1")))
}

start() {
    local fingerprint=$1 mark deadline output
    shift
    if running && [[ $(cat "$state/ray.fingerprint" 2>/dev/null) == "$fingerprint" ]]; then
        echo "ray is up"
        return
    fi
    stop
    mark=$(stat -c %s "$log" 2>/dev/null || echo 0)
    # 9>&-: the supervisor does not inherit the lock
    setsid --fork bash "$0" supervise "$state" "$@" </dev/null >>"$log" 2>&1 9>&-
    deadline=$((SECONDS + READY_S))
    until output=$(tail -c "+$((mark + 1))" "$log") && grep -q "$READY_LINE" <<<"$output"; do
        # a start that fails is reported, not repeated; on a busy host the supervisor tries again
        if ((SECONDS >= deadline)) || failed "$output"; then
            echo "ray did not start:" >&2
            tail -n 20 <<<"$output" >&2
            stop
            exit 1
        fi
        sleep 0.1
    done
    # for pod_logs.sh: a node takes the head's folder
    ps -ww -o args= -s "$(supervisor)" | awk 'match($0, /--temp_dir=[^ ]*/) { print substr($0, RSTART + 11, RLENGTH - 11) }' |
        sort -u >"$state/ray.folder"
    echo "$fingerprint" >"$state/ray.fingerprint"
    echo "ray started"
}

supervise() {
    local child code pause=1 began
    echo "$$ $(boot)" >"$state/ray.pid"
    trap 'kill -TERM "$child" 2>/dev/null; wait "$child" 2>/dev/null; exit 0' TERM INT
    while true; do
        began=$SECONDS
        "$@" --block &
        child=$!
        code=0
        wait "$child" || code=$?
        if ((SECONDS - began > 60)); then
            pause=1
        fi
        echo "$(date -u +%FT%TZ) $ENDED_LINE $code; starting it again in $pause s"
        sleep "$pause" &
        child=$!
        wait "$child" || true
        pause=$((pause < 16 ? pause * 2 : 30))
    done
}

case $verb in
start) exec 9>"$state/ray.lock" && flock 9 && start "$@" ;;
stop) exec 9>"$state/ray.lock" && flock 9 && stop ;;
status) running ;;
supervise) supervise "$@" ;;
*)
    echo "usage: pod_ray.sh start|stop|status STATE ..." >&2
    exit 2
    ;;
esac
