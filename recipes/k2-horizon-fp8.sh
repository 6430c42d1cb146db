#!/usr/bin/env bash
# Serve a K2-Horizon compressed-tensors FP8 checkpoint as recipes/k2-horizon-fp8.toml says; see docs/serving.md.
set -euo pipefail
# shellcheck source=recipes/lib.sh
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
serve k2-horizon-fp8 "$@"
