#!/usr/bin/env bash
# Does the image work? Two steps of training as a pipeline of two CPU processes, and a plan:
#
#   docker run --rm IMAGE smoke [OVERRIDE ...]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
lightning-pp --version
python -c 'import torch; print(f"{torch.cuda.device_count()} GPUs, CUDA {torch.version.cuda}")'
lightning-pp trainer.max_steps=2 trainer.num_sanity_val_steps=0 trainer.enable_progress_bar=false logger=none "$@"
lightning-pp-plan --check
echo "lightning-pp works"
