#!/usr/bin/env bash
# The machine that drives runs: a node of the Ray cluster that takes no work, and a Prefect worker.
# Needs RAY_HEAD (host:port), RAY_AUTH_TOKEN, PREFECT_API_URL; DPO_REPOSITORY names a git repository of your own,
# DPO_WEBHOOK_URL who is told of failures and champions, DPO_TIMEZONE (or TZ) the time zone of the schedules.
set -euo pipefail

checkout=/shared/dpo
"$(dirname "$0")/checkout.sh" "$(dirname "$0")/.." "$checkout" # made once; a newer image upgrades it
cd "$checkout"

if [ -n "${DPO_S3_BUCKET:-}" ]; then # where `dvc push` and `dvc pull` go; keys come from the environment
  dvc remote add --local --force --default shared "s3://$DPO_S3_BUCKET/dvc"
  if [ -n "${AWS_ENDPOINT_URL_S3:-}" ]; then dvc remote modify --local shared endpointurl "$AWS_ENDPOINT_URL_S3"; fi
fi

ray start --address "$RAY_HEAD" --num-cpus 0 --num-gpus 0 --disable-usage-stats
python -m flows.equip
export PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1 PREFECT_WORKER_WEBSERVER_PORT=8080 # for health checks
exec prefect worker start --pool dpo --with-healthcheck
