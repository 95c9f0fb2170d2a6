#!/usr/bin/env bash
# The machine that drives runs: a Prefect worker, and a node of the Ray cluster without CPUs and GPUs of its own.
# Required: RAY_HEAD (host:port), RAY_AUTH_TOKEN, PREFECT_API_URL. Optional: DPO_REPOSITORY (your own git repository),
# DPO_WEBHOOK_URL (receives notifications), DPO_TIMEZONE or TZ (time zone of the schedules).
set -euo pipefail

checkout=/shared/dpo
"$(dirname "$0")/checkout.sh" "$(dirname "$0")/.." "$checkout" # created once, upgraded by a newer image
cd "$checkout"

if [ -n "${DPO_S3_BUCKET:-}" ]; then # the remote of `dvc push` and `dvc pull`; keys are in the environment
  dvc remote add --local --force --default shared "s3://$DPO_S3_BUCKET/dvc"
  if [ -n "${AWS_ENDPOINT_URL_S3:-}" ]; then dvc remote modify --local shared endpointurl "$AWS_ENDPOINT_URL_S3"; fi
fi

ray start --address "$RAY_HEAD" --num-cpus 0 --num-gpus 0 --disable-usage-stats
python -m services.provision
export PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1 PREFECT_WORKER_WEBSERVER_PORT=8080 # for health checks
exec prefect worker start --pool dpo --with-healthcheck
