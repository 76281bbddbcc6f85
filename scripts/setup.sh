#!/usr/bin/env bash
# Installs parts of Tidegate from the pinned files in requirements/ into .venv, and nothing where nothing changed.
#
# Usage: scripts/setup.sh PART...
#   gateway    the gateway and launcher, and the commands `tidegate` and uv
#   engine     vLLM: the CUDA build where an NVIDIA GPU is present, else the CPU build
#   dev        what the checks and the Python tests need
#   audit      what asks for known vulnerabilities, in an environment of its own
#   checkov    the policy check of the manifests, in an environment of its own
#   loadtest   what the load tests need
#   fuzz       what the fuzzer needs
#   node       what the Node tests need, Node.js itself too where there is none
#   tools      Playwright; and Chromium and Prometheus's tools, if this is Debian and the user is root
#
# Environment:
#   PYTHON     the Python that .venv is made with (default: the best one found)
#   DEVICE     cuda or cpu: which engine to install, whatever the machine has (default: auto)
#   UV_*, PIP_*, pip's configuration files: where packages come from, if not from the default place
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ROOT=$PWD
VENV=$ROOT/.venv
PY=$VENV/bin/python
STATE=$VENV/.tidegate # what is installed: a fingerprint per part, the engine's kind, a list of packages
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
NODE_MODULES=tests/node/node_modules

say() { printf 'setup %3ds  %s\n' "$SECONDS" "$*"; }
die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# step TEXT COMMAND...: run it quietly, with its name and its time shown.
step() {
  local text=$1 began=$SECONDS status=0
  shift
  if [ -t 1 ]; then
    while printf '\rsetup %3ds  %s ...' "$SECONDS" "$text"; do sleep 1; is_parent_there; done 9>&- &
  else
    say "$text ..."
    while sleep 10 >/dev/null; do is_parent_there && say "$text: $((SECONDS - began)) s so far"; done 9>&- &
  fi
  clock=$!
  "$@" </dev/null || status=$?
  stop_clock
  [ ! -t 1 ] || printf '\r\033[K'
  if [ "$status" -ne 0 ]; then
    rm -f "$STATE/at-work" # an orderly failure: what is there may stay
    die "$text: failed, see above. Mend it (network? proxy? disk?) and run it again: it goes on from here."
  fi
  say "$text: done in $((SECONDS - began)) s"
}
is_parent_there() { kill -0 $$ 2>/dev/null || exit 0; }
clock=
stop_clock() {
  [ -z "$clock" ] || kill "$clock" 2>/dev/null || true
  clock=
}
trap stop_clock EXIT

# --- Python ---------------------------------------------------------------------------------------------------------

fits() { "$1" -ISc 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }
can_make_venvs() { "$1" -ISc 'import ensurepip, venv' 2>/dev/null; }

# 3.11 to 3.13 are tested; 3.14 is taken where nothing else is there.
find_python() {
  local names=(python3.11 python3.12 python3.13 python3 python3.14 python) name path bare=
  [ -z "${PYTHON:-}" ] || names=("$PYTHON")
  for name in "${names[@]}"; do
    while read -r path; do
      fits "$path" || continue
      if can_make_venvs "$path"; then
        echo "$path"
        return
      fi
      bare=$path
    done < <(type -ap "$name")
  done
  [ -z "$bare" ] ||
    die "$bare cannot make virtual environments: install its venv package (on Debian and Ubuntu: python3-venv)"
  name=${PYTHON:-python3}
  die "$name ($("$name" -V 2>&1 | head -n 1)) won't do: Python 3.11 to 3.14 is needed." \
    "Install it, or name it: make setup PYTHON=/path/to/python3"
}

# --- What is there --------------------------------------------------------------------------------------------------

fingerprint() { # of a part: changes with anything that it is installed from
  case $1 in
    gateway) cat requirements/uv.txt requirements/gateway.txt pyproject.toml ;;
    engine) cat "requirements/engine-$KIND.txt" requirements/torch-cpu.txt ;;
    node) cat requirements/node.txt tests/node/package-lock.json ;;
    tools) cat requirements/tools.txt scripts/setup.sh ;;
    *) cat "requirements/$1.txt" ;;
  esac | cksum
}

venv_is_whole() {
  [ -x "$PY" ] && fits "$PY" && [ ! -e "$STATE/at-work" ] || return 1
  if [ -e "$STATE/root" ]; then
    [ "$(cat "$STATE/root")" = "$ROOT" ]
  else
    "$PY" -Im pip --version >/dev/null 2>&1 # someone else made it
  fi
}

packages_are_there() {
  local package
  [ -e "$STATE/packages" ] || return 1
  while read -r package; do [ -e "$VENV/lib/$package/METADATA" ] || return 1; done <"$STATE/packages"
}

installed() { # is this part installed, as its pinned file says today?
  [ -e "$STATE/$1" ] && [ "$(cat "$STATE/$1")" = "$(fingerprint "$1")" ] || return 1
  case $1 in
    audit) [ -x "$VENV/audit/bin/pip-audit" ] ;;
    checkov) [ -x "$VENV/checkov/bin/checkov" ] ;;
    node) [ -e "$NODE_MODULES/.package-lock.json" ] ;;
    tools) ! may_use_apt || debian_tools_are_there ;;
  esac
}

have() {
  local name
  for name in "$@"; do PATH=$VENV/bin:$PATH command -v "$name" >/dev/null || return 1; done
}
may_use_apt() { [ "$(id -u)" = 0 ] && have apt-get dpkg-deb; }
debian_tools_are_there() { have chromium promtool prometheus; }

engine_kind() {
  case ${DEVICE:-auto} in
    cuda) echo gpu ;;
    cpu) echo cpu ;;
    auto) if [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo gpu; else echo cpu; fi ;;
    *) die "DEVICE=$DEVICE: must be auto, cuda or cpu" ;;
  esac
}

# --- Installing -----------------------------------------------------------------------------------------------------

pip_option() { # what pip would take an option from: its environment, then its files
  local variable section
  variable=PIP_$(tr 'a-z-' 'A-Z_' <<<"$1")
  if [ -n "${!variable:-}" ]; then
    echo "${!variable}"
  else
    for section in install global; do "$PY" -m pip config get "$section.$1" 2>/dev/null && return; done
  fi
  return 0
}

# uv doesn't read pip's configuration. Where uv has none of its own, it gets pip's.
share_pip_configuration() {
  local value
  value=$(pip_option find-links | tr -s '[:space:]' ,)
  [ -z "${value%,}" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-${value%,}}"
  value=$(pip_option index-url)
  [ -z "$value" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$value}"
  value=$(pip_option cert)
  [ -z "$value" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$value}"
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-120}
}

uv_install() { "$VENV/bin/uv" pip install --quiet --python "$PY" "$@"; }

make_venv() {
  local python
  python=$(find_python)
  say "Python: $python ($("$python" -IVc ''))"
  rm -rf "$VENV"
  mkdir -p "$STATE"
  touch "$STATE/at-work"
  step "virtual environment" "$python" -Im venv "$VENV"
}

install_gateway() {
  step "uv, the installer" "$PY" -Im pip install -qq --no-deps --no-input --require-hashes -r requirements/uv.txt
  share_pip_configuration
  step "gateway" uv_install -r requirements/gateway.txt
  step "tidegate itself" uv_install --no-deps -e .
}

install_torch_cpu() { # from the configured sources if they have it
  uv_install --no-deps -r requirements/torch-cpu.txt 2>/dev/null ||
    uv_install --no-deps -r requirements/torch-cpu.txt --index "$TORCH_CPU_INDEX"
}

install_engine() {
  local needs_mb=3000 free_mb
  case $(uname -s)-$(uname -m) in
    Linux-x86_64 | Linux-aarch64) ;;
    *)
      die "vLLM has no build for $(uname -s) on $(uname -m), only for Linux on x86_64 and aarch64." \
        "The gateway alone can be had here: scripts/setup.sh gateway"
      ;;
  esac
  [ "$KIND" = cpu ] || needs_mb=12000
  free_mb=$(df -Pm "$VENV" | awk 'NR == 2 { print $4 }')
  [ "$free_mb" -ge "$needs_mb" ] ||
    die "the engine needs $needs_mb MB of disk, $free_mb MB are free in $ROOT: make room there"
  if [ "$KIND" = cpu ]; then
    step "engine: torch for the CPU" install_torch_cpu
    step "engine: vLLM for the CPU" uv_install --no-deps -r requirements/engine-cpu.txt
  else
    step "engine: vLLM for NVIDIA GPUs, several GB" uv_install --no-deps -r requirements/engine-gpu.txt
  fi
}

install_node() {
  local major
  major=$(node --version 2>/dev/null | sed 's/^v\([0-9]*\).*/\1/' || true)
  if [ "${major:-0}" -lt 20 ] || ! command -v npm >/dev/null; then
    step "Node.js, since there is none from version 20 on" uv_install --no-deps -r requirements/node.txt
  fi
  PATH=$VENV/bin:$PATH step "Node packages" npm ci --prefix tests/node --no-audit --no-fund --loglevel=error
}

install_apart() { # into an environment of its own
  rm -rf "$VENV/$1"
  "$PY" -Im venv --without-pip "$VENV/$1"
  step "$1" "$VENV/bin/uv" pip install --quiet --python "$VENV/$1/bin/python" --no-deps -r "requirements/$1.txt"
}

install_debian_tools() {
  local folder
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  have chromium || apt-get install -y -qq --no-install-recommends chromium
  if ! have promtool prometheus; then
    folder=$(mktemp -d) # unpacked only: installed, it would start a server
    chmod 755 "$folder" # for apt's own user
    (cd "$folder" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb .) &&
      cp "$folder/usr/bin/promtool" "$folder/usr/bin/prometheus" "$VENV/bin/"
    rm -rf "$folder"
  fi
  debian_tools_are_there
}

install_tools() {
  step "Playwright" uv_install --no-deps -r requirements/tools.txt
  if may_use_apt && ! debian_tools_are_there; then
    step "Chromium and Prometheus, from Debian" try install_debian_tools
  fi
  debian_tools_are_there || say "without Chromium, promtool and prometheus the tests that need them are left out"
}
try() { "$@" || say "that failed, see above; going on without"; }

install_part() {
  case $1 in
    gateway) install_gateway ;;
    engine) install_engine ;;
    audit | checkov) install_apart "$1" ;;
    node) install_node ;;
    tools) install_tools ;;
    *) step "$1" uv_install --no-deps -r "requirements/$1.txt" ;;
  esac
}

# --- main -----------------------------------------------------------------------------------------------------------

[ $# -gt 0 ] || die "which parts? gateway, engine, dev, audit, checkov, loadtest, fuzz, node, tools"
for part in "$@"; do
  case $part in
    gateway | engine | dev | audit | checkov | loadtest | fuzz | node | tools) ;;
    *) die "no part is called $part: gateway, engine, dev, audit, checkov, loadtest, fuzz, node, tools" ;;
  esac
done
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV CONDA_PREFIX
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
KIND=$(engine_kind)

if command -v flock >/dev/null; then # one at a time
  exec 9>.setup.lock
  flock -n 9 || { say "another setup is at work here: waiting for it" && flock 9; }
fi

if [ -e "$VENV" ] || [ -L "$VENV" ]; then
  if ! venv_is_whole; then
    say "the .venv here is broken, unfinished or made elsewhere: making it anew"
    make_venv
  elif [[ " $* " == *" engine "* ]] && [ -e "$STATE/kind" ] && [ "$(cat "$STATE/kind")" != "$KIND" ]; then
    say "the .venv here holds the engine for the $(cat "$STATE/kind"): making it anew for the $KIND"
    make_venv
  elif ! packages_are_there; then
    rm -rf "$STATE" # not by this script, or something was taken out: see to every part again
  fi
else
  make_venv
fi

changed=
for part in gateway "$@"; do
  installed "$part" && continue
  [ -n "$changed" ] || { mkdir -p "$STATE" && touch "$STATE/at-work"; }
  [ -n "$changed" ] || [ "$part" = gateway ] || share_pip_configuration
  changed=yes
  rm -f "$STATE/$part"
  install_part "$part"
  fingerprint "$part" >"$STATE/$part"
  [ "$part" != engine ] || echo "$KIND" >"$STATE/kind"
done

if [ -n "$changed" ]; then
  echo "$ROOT" >"$STATE/root"
  (cd "$VENV/lib" && printf '%s\n' python3*/site-packages/*.dist-info) >"$STATE/packages"
  rm -f "$STATE/at-work"
  say "ready"
fi
