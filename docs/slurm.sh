#!/bin/bash
# One run on several nodes, queued again after a preemption and after its time limit until it is done:
#   sbatch docs/slurm.sh pos=rope seed=0
# outputs/ must lie on a file system that all nodes see.
#SBATCH --job-name=ropewalk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1          # one torchrun a node, which starts one process a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@180          # to this script, three minutes before the limit
#SBATCH --requeue                    # after a preemption
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.txt

run=outputs/slurm_$SLURM_JOB_ID      # the same after a requeue, which keeps the job's number
if compgen -G "$run/checkpoint/*.safetensors" > /dev/null; then
    settings=("resume=$run")
else
    rm -f "$run/config.yaml"         # of a start that was killed before its first checkpoint
    settings=("$@" "hydra.run.dir=$run")
fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node gpu --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d --rdzv-endpoint "$first:29500" train.py "${settings[@]}" &
step=$!
trap 'stopping=1; kill -TERM "$step"' USR1
wait "$step"; status=$?
if [ -n "$stopping" ]; then          # that wait ended with the signal; the run has not ended yet
    wait "$step"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
