"""Starts the command line that follows twice, as ``srun`` starts two tasks; the code is the first that is not 0."""

from __future__ import annotations

import os
import subprocess
import sys

if __name__ == "__main__":
    tasks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[1:]],
            env=os.environ
            | {
                "SLURM_NTASKS": "2",
                "SLURM_NTASKS_PER_NODE": "2",
                "SLURM_NNODES": "1",
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NAME": "training",
                "SLURM_NODELIST": "localhost",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NODEID": "0",
            },
        )
        for rank in range(2)
    ]
    codes = [task.wait() for task in tasks]
    sys.exit(next((code for code in codes if code), 0))
