#!/usr/bin/env bash
# A training run on Slurm, with one worker a host: sbatch deploy/slurm.sh --config C
#SBATCH --job-name=mesh-transformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
# two minutes before the time limit; a preemption sends SIGTERM too
#SBATCH --signal=TERM@120
set -uo pipefail

srun --kill-on-bad-exit=1 mesh-transformer train "$@"
code=$?
# the run has saved after SIGTERM: the same job waits for hosts again, and then resumes
if ((code == 143)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
