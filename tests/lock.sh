#!/usr/bin/env bash
# Resolve tests/requirements.in again: tests/lock.sh TOOLS
set -euo pipefail
tools=${1:?TOOLS}
here=$(cd "$(dirname "$0")" && pwd)
lock=$here/requirements.lock
{
  echo "# Generated from tests/requirements.in by 'make lock': do not edit."
  "$tools/bin/uv" --no-config pip compile --quiet --generate-hashes --universal --python-version 3.11 \
    --only-binary :all: --no-annotate --no-header "$here/requirements.in"
} >"$lock.new"
mv "$lock.new" "$lock"
echo "requirements.lock: $(grep -c '==' "$lock") packages"
