# Sourced by the recipes. All decisions are in launch/, which needs Python 3.11 alone until it starts the engine.

serve() { # ARTIFACT [ARGUMENT]...
  local root
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python3 -P -m launch "$@"
}
