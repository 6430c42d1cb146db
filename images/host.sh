#!/usr/bin/env bash
# Make this machine able to build images, and print the container client that can:
#   images/host.sh
# As root on Debian or Ubuntu it installs what is missing and starts the container engine where none runs;
# elsewhere it names what is missing and exits with 2.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
log=${TMPDIR:-/tmp}/horizon-dockerd.log

refuse() {
  echo "cannot run: $*" >&2
  exit 2
}

can_install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && grep -qE '^ID(_LIKE)?=.*(debian|ubuntu)' /etc/os-release
}

# Debian package of each missing command or module.
missing() {
  command -v curl >/dev/null || echo curl
  command -v mmdebstrap >/dev/null || echo mmdebstrap
  command -v zstd >/dev/null || echo zstd
  [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || echo debian-archive-keyring
  [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
  if ! command -v python3 >/dev/null; then
    echo python3 python3-venv
  elif ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    echo python3-venv
  fi
}

install() {
  echo "installing: $*" >&2
  local output
  # --no-remove: another container engine of the machine's would conflict with ours, and -y would let it go.
  if ! output=$( (apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-remove --no-install-recommends "$@") 2>&1); then
    refuse "apt-get could not install $*: $(echo "$output" | tail -1)"
  fi
}

start_engine() {
  echo "starting the container engine" >&2
  if [ -d /run/systemd/system ]; then
    systemctl start docker >&2 || refuse "systemctl could not start docker; see journalctl -u docker"
    return
  fi
  # Without systemd (a container, a minimal host). Builds and checks use no network, so an engine without a bridge
  # serves as well where the kernel lets no bridge be made.
  local options
  for options in "" "--bridge=none --iptables=false"; do
    # shellcheck disable=SC2086
    setsid dockerd $options >"$log" 2>&1 </dev/null &
    for _ in $(seq 60); do
      [ ! -S /var/run/docker.sock ] || ! answers || return 0
      kill -0 $! 2>/dev/null || break
      sleep 0.5
    done
  done
  refuse "dockerd does not start: $(tail -1 "$log")"
}

answers() {
  python3 "$here/docker.py" ping 2>/dev/null
}

mapfile -t packages < <(missing | xargs -r -n1)
if [ ${#packages[@]} -gt 0 ]; then
  can_install || refuse "missing: ${packages[*]} (as root on Debian or Ubuntu this installs them)"
  install "${packages[@]}"
fi
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  refuse "Python 3.11 or newer is needed, python3 is $(python3 -V 2>&1 | cut -d' ' -f2)"

if client=$(python3 "$here/docker.py" find 2>/dev/null); then
  echo "$client"
  exit 0
fi
# No client can build: the engine may be missing, stopped, or every client may lack BuildKit.
if [ -z "${DOCKER_HOST:-}" ] && command -v "${DOCKER:-docker}" >/dev/null && ! answers && command -v dockerd >/dev/null && [ "$(id -u)" = 0 ]; then
  start_engine
fi
if ! python3 "$here/docker.py" find >/dev/null 2>&1 && can_install; then
  engine=(docker.io)
  for package in docker-cli docker-buildx; do # separate packages since Debian 13
    [ -z "$(apt-cache show --no-all-versions "$package" 2>/dev/null)" ] || engine+=("$package")
  done
  install "${engine[@]}"
  answers || [ -n "${DOCKER_HOST:-}" ] || start_engine
fi
exec python3 "$here/docker.py" find
