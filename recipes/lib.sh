# shellcheck shell=bash
# Sourced by the recipes. All decisions are in launch/, which needs Python 3.11 alone until it starts the engine.

serve() { # ARTIFACT [ARGUMENT]...
  local root
  root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
  # Nobody else's modules: what runs is what the image holds.
  PYTHONPATH=$root exec python3 -P -m launch "$@"
}
