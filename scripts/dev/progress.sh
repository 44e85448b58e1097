# Sourced by the scripts that install or build for longer than a moment.
#
# shown LOG WHAT COMMAND... runs a command with its output in LOG. Meanwhile it shows WHAT it does,
# the elapsed time and the last line of LOG on standard error: on a terminal in one line that is
# updated each second, elsewhere in a line every 15 seconds. Returns the command's exit status.
shown() {
    local log=$1 what=$2 status=0 watcher
    shift 2
    : >"$log"
    _watch "$log" "$what" $$ &
    watcher=$!
    "$@" >"$log" 2>&1 || status=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    if _drawn; then printf '\r\033[K' >&2; fi
    return $status
}

# pip_shown LOG WHAT PYTHON ARGUMENT...: `pip install ARGUMENT...`, shown. pip prints what it
# collects, each download with its size, and what it builds.
pip_shown() {
    local log=$1 what=$2 python=$3
    shift 3
    shown "$log" "$what" "$python" -m pip --disable-pip-version-check install \
        --progress-bar off "$@"
}

_drawn() { [ -t 2 ] && [ "${TERM:-dumb}" != dumb ]; }

# It also ends if the script is killed.
_watch() {
    local seconds=0 line
    while sleep 1 && kill -0 "$3" 2>/dev/null; do
        seconds=$((seconds + 1))
        if ! _drawn && [ $((seconds % 15)) != 0 ]; then continue; fi
        line=$(tail -n 1 "$1" 2>/dev/null | tr -cd '[:print:]')
        line="$2, $seconds s${line:+: $line}"
        if _drawn; then printf '\r\033[K%.78s' "$line" >&2; else printf '%.78s\n' "$line" >&2; fi
    done
}
