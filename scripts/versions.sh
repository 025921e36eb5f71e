#!/usr/bin/env bash
# Runs tests with the oldest and the newest releases that pyproject.toml admits, and writes tests/results/versions.csv.
#   bash scripts/versions.sh                  every row of the table below
#   bash scripts/versions.sh oldest-3.10      some rows
# It needs uv (pip install uv), which also fetches the Pythons that are not on PATH where it can. UV_TORCH_BACKEND=cpu
# chooses torch's CPU builds where their index can be reached; PyPI has only CUDA builds, some GB each. Environments
# stay in .versions/, so that a second run installs nothing. TESTS names other tests, WORKERS their processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The trainer with one process and several, all model types, saving and resuming, data, evaluation, the commands.
TESTS="${TESTS:-tests/test_models_training.py tests/test_trainer.py tests/test_resume.py tests/test_contrastive.py
  tests/test_data.py tests/test_images.py tests/test_evaluation.py tests/test_hub_metrics.py tests/test_publishing.py}"
TABLE=tests/results/versions.csv

# row | Python | which releases uv takes of the requirements | further requirements
ROWS="
newest-3.10 | 3.10 | highest |
newest-3.11 | 3.11 | highest |
newest-3.12 | 3.12 | highest |
newest-3.13 | 3.13 | highest |
oldest-3.10 | 3.10 | lowest-direct |
oldest-3.11 | 3.11 | lowest-direct |
oldest-transformers | 3.11 | highest | transformers==$(floor transformers)
"
