#!/usr/bin/env bash
# Run tests/engine and tests/kernels inside the checked image of one artifact, as it runs in production: no network, read-only,
# unprivileged. One image stands for all: the engine lies in the layers that they share (tests/image holds them to it), and the
# recipes of all lie in this checkout.
#   tests/in_container.sh ARTIFACT
set -euo pipefail
artifact=${1:?ARTIFACT}
root=$(cd "$(dirname "$0")/.." && pwd)
docker=$("$root/images/host.sh")
exec "$docker" run --rm --network=none --read-only --cap-drop=ALL --security-opt=no-new-privileges \
  --tmpfs=/tmp:exec,mode=1777 --tmpfs=/var/cache/horizon:exec,mode=777 \
  --volume="$root/tests:/opt/horizon/tests:ro" --volume="$root/images:/opt/horizon/images:ro" \
  --volume="$root/benchmarks:/opt/horizon/benchmarks:ro" --volume="$root/recipes:/opt/horizon/recipes:ro" \
  --env=PYTHONDONTWRITEBYTECODE=1 \
  "horizon-images/$artifact:candidate" python3 -m pytest -q -p no:cacheprovider --import-mode=importlib \
  -W ignore::DeprecationWarning -W ignore::UserWarning --rootdir=/opt/horizon /opt/horizon/tests/engine /opt/horizon/tests/kernels
