#!/usr/bin/env bash
# What a container does: `train [options]` (default), `test [pytest options]`, `doctor`, or any other command.
set -euo pipefail
cd /work

case "${1:-train}" in
    train)
        shift || true
        if [[ ! -w runs ]]; then
            echo "error: /work/runs is not writable by user $(id -u); mount a folder that is, or run with --user." >&2
            exit 2
        fi
        # All GPUs, or two CPU ranks without one; UNIFMOE_RANKS says otherwise.
        if [[ "${DS_ACCELERATOR:-}" != cpu ]] && nvidia-smi -L >/dev/null 2>&1; then
            ranks=(--num_gpus "${UNIFMOE_RANKS:-$(nvidia-smi -L | wc -l)}")
        else
            export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
            ranks=(--num_accelerators "${UNIFMOE_RANKS:-2}")
        fi
        exec deepspeed "${ranks[@]}" launch/train.py "$@"
        ;;
    test) exec python -m pytest -q -n "${UNIFMOE_TEST_PROCESSES:-2}" -p no:cacheprovider "${@:2}" ;;
    doctor) exec python launch/doctor.py "${@:2}" ;;
    *) exec "$@" ;;
esac
