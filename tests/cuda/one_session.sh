#!/usr/bin/env bash
# What 15 minutes on one GPU can show, the most valuable first: tests/cuda/one_session.sh FOLDER
# Each command has a limit of its own. FOLDER gets their output, figures as JSON, and codes.txt with all exit codes.
set -u
out=$(realpath -m "$1")
mkdir -p "$out"
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python=${CUDA_PYTHON:-python3}
steps=(examples/benchmarks/step_time/main.py --device cuda --rounds 10)
two=(-m torch.distributed.run --standalone --nproc-per-node 2)

limited() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2 begin=$SECONDS
    shift 2
    timeout --kill-after 10 "$seconds" "$@" > "$out/$name.log" 2>&1
    echo "$name: exit code $? after $((SECONDS - begin)) s" | tee -a "$out/codes.txt"
}

nvidia-smi > "$out/card.txt" 2>&1
limited one_process 60 make check-cuda CUDA_PYTHON="$python" CUDA_OPTIONS="-k one_process"
limited failures 180 make check-cuda CUDA_PYTHON="$python" CUDA_OPTIONS="-k failures --junitxml=$out/failures.xml"
limited step_time_gloo 120 "$python" "${two[@]}" "${steps[@]}" --backend gloo --json "$out/gloo.json"
# NCCL lets two processes share a GPU if each believes that it is on a host of its own.
export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
limited step_time_nccl 120 "$python" "${two[@]}" --no-python bash -c \
    'NCCL_HOSTID=$RANK exec "$@"' bash "$python" "${steps[@]}" --json "$out/nccl.json"
limited step_time_alone 90 "$python" "${steps[@]}" --json "$out/alone.json"
limited all 480 make check-cuda CUDA_PYTHON="$python" CUDA_OPTIONS="--junitxml=$out/all.xml"
