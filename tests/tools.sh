#!/usr/bin/env bash
# Print a folder with the test tools of tests/requirements.lock, made below the cache where it is missing:
#   tests/tools.sh CACHE
# The machine's own pip configuration is left out; the system's CA bundle is kept.
set -euo pipefail
cache=${1:?CACHE}
here=$(cd "$(dirname "$0")" && pwd)
python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
tools=$cache/tools-$python-$(sha256sum "$here/requirements.lock" | cut -c1-12)
mkdir -p "$cache" || {
  echo "cannot run: $cache cannot be made: set HORIZON_CACHE to a folder that can" >&2
  exit 2
}
exec 9>"$cache/tools.lock"
flock 9 # two makes at once install once
if [ ! -e "$tools/ready" ]; then
  echo "installing the test tools (tests/requirements.lock)" >&2
  rm -rf "$tools"
  mkdir -p "$cache"
  bundle=/etc/ssl/certs/ca-certificates.crt
  cert=()
  [ ! -e "$bundle" ] || cert=(--cert "$bundle")
  if ! { python3 -m venv "$tools" && PIP_CONFIG_FILE=/dev/null "$tools/bin/python" -m pip --isolated \
    --disable-pip-version-check install --quiet --require-hashes --only-binary :all: --no-deps \
    "${cert[@]}" -r "$here/requirements.lock"; } >&2; then
    rm -rf "$tools"
    echo "cannot run: the test tools could not be installed (network to PyPI?); run again" >&2
    exit 2
  fi
  touch "$tools/ready"
fi
echo "$tools"
