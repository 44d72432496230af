#!/usr/bin/env bash
# Make a virtual environment with lightning_pp in it: the same steps in the container and in CI.
#
#   docker/install.sh VENV EXTRAS [gpu|cpu|cu130|cu126|...] [all|dependencies|package]
#
# EXTRAS is a comma-separated list of the package's extras. `gpu` takes torch from the default package index, where it
# comes with CUDA; `cpu` and `cu...` prefer the build of that name on PyTorch's own index. `dependencies` needs only
# pyproject.toml, constraints.txt and this folder; `package` adds the package itself to what `dependencies` has made.
# PREFIX names another folder for the package, laid out as VENV, to be copied over it.
# PYTHON names the interpreter (default: python3); it has to be 3.11 or newer.
set -euo pipefail

usage() {
  echo "usage: $0 VENV EXTRAS [gpu|cpu|cu130|...] [all|dependencies|package]" >&2
  exit 2
}
if [ "$#" -lt 2 ] || [ "$#" -gt 4 ]; then
  usage
fi
venv=$1 extras=$2 device=${3:-gpu} step=${4:-all}
source_tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

pip_options=(--disable-pip-version-check --constraint "$source_tree/constraints.txt")
case $device in
  gpu) ;;
  cpu | cu[0-9]*) pip_options+=(--extra-index-url "https://download.pytorch.org/whl/$device") ;;
  *)
    echo "unknown device '$device': gpu, cpu, or a CUDA build such as cu130" >&2
    exit 2
    ;;
esac
case $step in
  all | dependencies | package) ;;
  *) usage ;;
esac

if [ "$step" != package ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  list=$(mktemp)
  trap 'rm -f "$list"' EXIT
  "$venv/bin/python" "$source_tree/docker/requirements.py" "$extras" > "$list"
  "$venv/bin/pip" install "${pip_options[@]}" --requirement "$list"
fi
if [ "$step" != dependencies ]; then
  "$venv/bin/pip" install "${pip_options[@]}" --no-deps ${PREFIX:+--prefix "$PREFIX"} "$source_tree"
  "$venv/bin/pip" check
fi
