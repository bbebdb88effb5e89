#!/usr/bin/env bash
# Everything that needs a GPU, in one run, on a machine that may have neither cargo nor this repository's sources:
# the program carries its kernels. Writes reports and logs to OUT and says in a line each how it went.
#
#   benches/gpu-suite.sh path/to/ferrokv OUT [COMMIT]
#
# With FERROKV_SUITE_PEERS=1 PyTorch and Triton are measured beside (benches/peers/int8.py, run from the root).
# Each step has a limit, so that a kernel that hangs costs that step alone. About five minutes on an H200.
set -u
ferrokv=$1 out=$2 commit=${3:-unknown}
mkdir -p "$out"
failed=0

# step NAME SECONDS COMMAND...
step() {
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1
    code=$?
    printf '%-20s exit %3d  %4d s  %s\n' "$name" $code $((SECONDS - start)) "$(tail -n 1 "$out/$name.txt" | cut -c1-150)"
    [ $code -eq 0 ] || failed=1
    return $code
}

# -v names each case as it ends: after a hang the log says which one was next.
step check-quick 60 "$ferrokv" check -v --backend cuda --json "$out/check-quick.json" || exit 1
step bench-launch 30 "$ferrokv" bench launch --json "$out/bench-launch.json"
peers=()
if [ "${FERROKV_SUITE_PEERS:-0}" = 1 ]; then
    step peers-quick 60 python3 benches/peers/int8.py --quick
    peers=(--peers --peers-seconds 60)
fi
# The largest size first; past 90 s no further size starts, and the report says which are missing.
step bench-int8 280 "$ferrokv" bench int8 --backend cuda --no-cpu --seconds 90 "${peers[@]}" --commit "$commit" \
    --json "$out/bench-int8.json" --plot "$out/bench-int8"
step check-full 120 "$ferrokv" check --full --backend cuda --json "$out/check-full.json"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck initcheck synccheck racecheck; do
        # racecheck knows barriers only: probe_last_lane orders itself by a fence and an atomic, which it warns of.
        step "sanitizer-$tool" 60 compute-sanitizer --tool $tool --error-exitcode 9 "$ferrokv" check --sanitize
    done
fi
exit $failed
