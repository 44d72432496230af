#!/usr/bin/env bash
# Make a virtual environment with lightning_pp in it: the same steps in the container and in CI.
#
#   docker/install.sh VENV EXTRAS [gpu|cpu]
#
# EXTRAS is a comma-separated list of the package's extras. `gpu` takes torch from the default package index, where it
# comes with CUDA; `cpu` prefers the smaller build without. PYTHON names the interpreter (default: python3).
set -euo pipefail

if [ "$#" -lt 2 ] || [ "$#" -gt 3 ]; then
  echo "usage: $0 VENV EXTRAS [gpu|cpu]" >&2
  exit 2
fi
venv=$1 extras=$2 device=${3:-gpu}
source_tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

pip_options=(--no-cache-dir --disable-pip-version-check --constraint "$source_tree/constraints.txt")
case $device in
  gpu) ;;
  cpu) pip_options+=(--extra-index-url https://download.pytorch.org/whl/cpu) ;;
  *)
    echo "unknown device '$device': gpu or cpu" >&2
    exit 2
    ;;
esac

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install "${pip_options[@]}" "${source_tree}[$extras]"
"$venv/bin/pip" check
