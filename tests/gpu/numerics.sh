#!/usr/bin/env bash
# The comparison with the reference, on one H200, inside the image or its unpacked root:
#   numerics.sh measure [FOLDER]  three checkpoints of six layers, two prompts each, every fault planted in the reference
#   numerics.sh planted [FOLDER]  engines that are wrong on purpose, each against the bounds of the first
#   numerics.sh partial [FOLDER]  a four-layer cut with partial rotation: its wrong pairing
#   numerics.sh full [FOLDER]     load, numerics and cleanup of the suite on all layers (48 GB)
# FOLDER (default /dev/shm/numerics) holds one checkpoint at a time, and in out what is to be kept. One JSON line a result.
# FAULTS="NAME ..." takes some of the planted faults; SEEDS, PROMPTS and FAULT_SEEDS (of how many checkpoints faults are
# planted in the reference) change the measurement. TIMEOUT (seconds) bounds it.
set -euo pipefail
what=${1:?say measure, planted, partial or full}
folder=${2:-/dev/shm/numerics}
cd "$(dirname "$(readlink -f "$0")")/../.."
mkdir -p "$folder/out"
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD
engine=$(python3 -c 'import importlib.util as u; print(u.find_spec("sglang").submodule_search_locations[0])')
[ -e "$engine/srt/model_loader/module_outputs.py" ] || {
  echo "numerics.sh: the engine of this root has no recorder: build the image from this checkout" >&2
  exit 2
}
read -ra faults <<<"${FAULTS:-all}"
read -ra seeds <<<"${SEEDS:-0 1 2}"

case $what in
  measure)
    timeout "${TIMEOUT:-360}" python3 -B -m benchmarks.numerics --work "$folder" --out "$folder/out/numerics-mova-cut6.json" \
      --layers 6 --seeds "${seeds[@]}" --prompts "${PROMPTS:-2}" --faults "${faults[@]}" --fault-seeds "${FAULT_SEEDS:-3}"
    ;;
  partial)
    timeout "${TIMEOUT:-150}" python3 -B -m benchmarks.numerics --work "$folder" --out "$folder/out/numerics-375b-cut4.json" \
      --model 375b-a23b --layers 4 --seeds 0 --prompts 1 --faults rope-pairing
    rm -rf "$folder/seed-0"
    ;;
  planted)
    bounds=$folder/out/numerics-mova-cut6.json
    [ ! -e "$bounds" ] || export BOUNDS="$bounds"
    select=()
    [ "${faults[*]}" = all ] || select=(-k "$(printf ' or %s' "${faults[@]}" | cut -c5-)")
    WORK=$folder timeout "${TIMEOUT:-400}" python3 -B -m pytest -q -s -p no:cacheprovider \
      tests/gpu/test_planted_faults.py "${select[@]}"
    ;;
  full)
    export ROUTER_PARTITIONS=2 UNCATALOGUED=1 DRAIN_SECONDS=60 START_SECONDS=400
    model=${MODEL_DIR:-$folder/full}
    [ -e "$model/config.json" ] || timeout 120 python3 -B -m qualify synth --full --device cuda --out "$model" \
      --config qualify/models/published/K2-Horizon-MoVA-36B-A4B-FP8.config.json >&2
    timeout "${TIMEOUT:-500}" python3 -B -m qualify run --tier gpu --artifact mova-fp8 --model-dir "$model" --target h200 \
      --out "$folder/out/run" --only load numerics cleanup >&2 || [ $? = 1 ]
    python3 - "$folder/out/run" <<'PY'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1], "stages").glob("*.json")):
    stage = json.loads(path.read_text())
    print(json.dumps({key: stage[key] for key in ("stage", "result", "reason", "seconds", "gpu", "numbers")}))
PY
    ;;
  *) echo "numerics.sh: $what is none of measure, planted, partial and full" >&2; exit 1 ;;
esac
