#!/usr/bin/env bash
# Launches config.yaml: run it on every node of the trainer.
set -euo pipefail
cd "$(dirname "$0")"
accelerate launch --config_file config_accelerate.yaml -m trl.scripts.grpo --config config.yaml "$@"
