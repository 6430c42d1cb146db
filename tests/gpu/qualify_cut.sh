#!/usr/bin/env bash
# Qualify a six-layer cut of a MoVA FP8 checkpoint on one H200, inside the image or its unpacked root:
#   qualify_cut.sh [FOLDER]
# FOLDER (default /dev/shm) then holds 10 GB of synthetic checkpoint in cut6, and the run directory in out/run. With
# FAULT=loading (the engine is killed while it loads), FAULT=memory (a neighbour takes the GPU's memory meanwhile),
# FAULT=engine or FAULT=launcher (killed once the load stage has passed) the run directory is out/fault-$FAULT, and what
# the stages say of it is shown in the same way. MODEL_DIR names another checkpoint, such as the cut on a read-only mount.
set -euo pipefail
cd "${HORIZON_HOME:-/opt/horizon}"
folder=${1:-/dev/shm}
config=qualify/models/published/K2-Horizon-MoVA-36B-A4B-FP8.config.json
export ROUTER_PARTITIONS=2 UNCATALOGUED=1 DRAIN_SECONDS=60 START_SECONDS=400

model=${MODEL_DIR:-$folder/cut6}
[ -e "$model/config.json" ] || python3 -B -m qualify synth --config "$config" --out "$model" --layers 6 --device cuda

out=$folder/out/${FAULT:+fault-}${FAULT:-run}
mkdir -p "$folder/out"
stages=()
killer=
if [ -n "${FAULT:-}" ]; then
  stages=(--only load requests performance cleanup)
  rm -rf "$out"
  (
    wait_for=$out/stages/load.json
    [[ "$FAULT" = engine || "$FAULT" = launcher ]] || wait_for=$out/work/status.json
    until [ -e "$wait_for" ]; do sleep 0.2; done
    if [ "$FAULT" = memory ]; then
      # 3 GB are not enough for the weights; what was taken comes back when the load has failed.
      exec python3 - "$out/stages/load.json" <<'PY'
import pathlib, sys, time
import torch
free, _ = torch.cuda.mem_get_info()
taken = torch.empty(free - 3 * 10**9, dtype=torch.uint8, device="cuda")
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.2)
PY
    fi
    sleep 5
    field=engine file=status
    [ "$FAULT" != launcher ] || field=pid file=server
    kill -9 "$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$out/work/$file.json" $field)"
  ) &
  killer=$!
fi
# Exit code 1 is expected where a fault fails its stage.
python3 -B -m qualify run --tier gpu --artifact mova-fp8 --model-dir "$model" --target h200 --out "$out" \
  "${stages[@]}" || [ $? = 1 ]
[ -z "$killer" ] || kill "$killer" 2>/dev/null || true
python3 - "$out" <<'PY'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1], "stages").glob("*.json")):
    stage = json.loads(path.read_text())
    print(json.dumps({key: stage[key] for key in ("stage", "result", "reason", "seconds", "gpu", "numbers")}))
PY
