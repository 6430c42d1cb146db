#!/usr/bin/env bash
# Print the path of a headless Chromium, installed where root on Debian or Ubuntu has none:
#   tests/browser.sh
# Debian's chromium-headless-shell: about 100 MB to fetch, with security updates by the mirror that the images need anyway.
set -euo pipefail
find_browser() {
  local name
  for name in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do
    ! command -v "$name" || return 0
  done
  return 1
}
if find_browser; then exit 0; fi
if ! { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && grep -qE '^ID(_LIKE)?=.*(debian|ubuntu)' /etc/os-release; }; then
  echo "cannot run: missing: chromium-headless-shell, chromium or google-chrome (as root on Debian or Ubuntu this installs one)" >&2
  exit 2
fi
echo "installing: chromium-headless-shell" >&2
if ! output=$( (apt-get update -qq &&
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-remove --no-install-recommends \
    chromium-headless-shell fonts-dejavu-core) 2>&1); then
  echo "cannot run: apt-get could not install chromium-headless-shell: $(tail -1 <<<"$output")" >&2
  exit 2
fi
find_browser
