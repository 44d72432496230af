#!/usr/bin/env bash
# Run a command, or, given nothing or only overrides, lightning-pp with them.
#
#   docker run IMAGE recipe=byte_gpt trainer.max_steps=10       lightning-pp starts its own processes
#   docker run -e PET_NPROC_PER_NODE=8 IMAGE recipe=llama       torchrun starts them, told by its own PET_* variables
#   docker run IMAGE torchrun --nproc-per-node 8 -m lightning_pp recipe=llama
set -euo pipefail

# torch names its folder in /tmp after the user, and any user of the image may share /tmp with others
if [ "${USER:-}" = trainer ]; then
  export USER="trainer-$EUID"
fi

if [ "$#" -gt 0 ] && command -v -- "$1" >/dev/null 2>&1; then
  exec "$@"
elif [ -n "${PET_NPROC_PER_NODE:-}${PET_NNODES:-}" ]; then
  exec torchrun -m lightning_pp "$@"
else
  exec lightning-pp "$@"
fi
