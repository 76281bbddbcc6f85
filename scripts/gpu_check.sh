#!/usr/bin/env bash
# Proves on a machine with a GPU, in five minutes once installed, that the whole of it works there; prints one table.
#
# Usage: scripts/gpu_check.sh [MODEL]      (default: the embedded model)
#
# Environment: PYTHON of an environment that has vLLM already (default: .venv, which is set up first);
#              DEVICE=cpu tries the same without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # the engine's processes import thousands of modules each

DEVICE=${DEVICE:-cuda}
if [ -z "${PYTHON:-}" ]; then
  DEVICE=$DEVICE bash scripts/setup.sh gateway engine
  PYTHON=.venv/bin/python
fi
exec "$PYTHON" -m scripts.gpu_check --device "$DEVICE" "$@"
