#!/usr/bin/env bash
# The machine that drives runs: a node of the Ray cluster that takes no work, and a Prefect worker.
# Needs RAY_HEAD (host:port), RAY_AUTH_TOKEN, PREFECT_API_URL; DPO_REPOSITORY names a git repository of your own,
# DPO_WEBHOOK_URL who is told of failures and champions, DPO_TIMEZONE (or TZ) the time zone of the schedules.
set -euo pipefail

checkout=/shared/dpo
if [ ! -d "$checkout/.git" ]; then
  if [ -n "${DPO_REPOSITORY:-}" ]; then
    git clone "$DPO_REPOSITORY" "$checkout"
  else # the pipeline as the image has it, in a repository of its own: a run is a commit
    mkdir -p "$checkout"
    cp --recursive /app/. "$checkout"
    git -C "$checkout" init --quiet --initial-branch main
    git -C "$checkout" add --all
    git -C "$checkout" -c user.name=dpo -c user.email=dpo@localhost commit --quiet --message "As the image has it"
  fi
fi
cd "$checkout"

if [ -n "${DPO_S3_BUCKET:-}" ]; then # where `dvc push` and `dvc pull` go; keys come from the environment
  dvc remote add --local --force --default shared "s3://$DPO_S3_BUCKET/dvc"
  if [ -n "${AWS_ENDPOINT_URL_S3:-}" ]; then dvc remote modify --local shared endpointurl "$AWS_ENDPOINT_URL_S3"; fi
fi

ray start --address "$RAY_HEAD" --num-cpus 0 --num-gpus 0 --disable-usage-stats
python -m flows.equip
export PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1 PREFECT_WORKER_WEBSERVER_PORT=8080 # for health checks
exec prefect worker start --pool dpo --with-healthcheck
