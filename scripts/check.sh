#!/usr/bin/env bash
# Runs the checks and tests with what scripts/setup.sh installed. All of them run, even after one has failed.
#
# Usage: scripts/check.sh lint|fast|all
#   lint   format, lint, types
#   fast   these and the tests that need no engine and little time
#   all    these and every test
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=$PWD/.venv/bin:$PATH

failed=()
check() { # check NAME COMMAND...
  local name=$1 output began=$SECONDS
  shift
  if output=$("$@" 2>&1); then
    printf '%-7s ok, %d s\n' "$name" $((SECONDS - began))
  else
    printf '%s\n%-7s FAILED: %s\n' "$output" "$name" "$*"
    failed+=("$name")
  fi
}

parallel=(tests/unit tests/gateway tests/kubernetes -n 3 --dist worksteal) # most of them wait a lot, some run a browser
case ${1:-} in
  lint | all) ;;
  fast) parallel+=(-m "not slow") ;;
  *)
    echo "usage: scripts/check.sh lint|fast|all" >&2
    exit 2
    ;;
esac

check format ruff format --check .
check lint ruff check .
check types mypy

if [ "$1" != lint ]; then
  python -m pytest "${parallel[@]}" || failed+=(tests)
fi
if [ "$1" = all ]; then
  python -m pytest tests/engine || failed+=("engine tests") # alone: an engine takes every core
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}" >&2
  exit 1
fi
