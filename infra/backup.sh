#!/usr/bin/env bash
# Back up and restore the stack of infra/compose.yaml: the databases of Prefect and MLflow, the object store, and the commits
# of all runs. Called by `make backup TO=folder` and `make restore FROM=folder`; COMPOSE overrides the compose command.
#   infra/backup.sh backup FOLDER     the stack must be running; FOLDER must not exist
#   infra/backup.sh restore FOLDER    replaces the databases, adds objects and branches, restarts the servers
set -euo pipefail
umask 077 # the databases hold MLflow's users and Prefect's secrets
verb=${1:-} folder=${2:-}
read -ra compose <<<"${COMPOSE:-docker compose -f infra/compose.yaml}"
databases=(prefect mlflow)
fail() { echo "error: $*" >&2; exit 2; }
log() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
in_worker() { "${compose[@]}" exec -T worker "$@"; }
sql() {
  "${compose[@]}" exec -T postgres psql --username dpo --dbname postgres --quiet --set ON_ERROR_STOP=1 \
    --command "SET client_min_messages = warning" --command "$1"
}

backup() {
  [ ! -e "$folder" ] || fail "$folder already exists. Name a new folder: make backup TO=folder"
  mkdir -p "$folder.part"
  # Databases first: objects are never deleted, so the copy of the object store has every object that a database refers to.
  for name in "${databases[@]}"; do
    log "database $name"
    "${compose[@]}" exec -T postgres pg_dump --username dpo --format custom "$name" >"$folder.part/$name.dump"
  done
  log "commits of the runs"
  in_worker git -C /shared/dpo bundle create --quiet - --all >"$folder.part/runs.bundle"
  log "objects"
  in_worker python -m infra.objects dump >"$folder.part/objects.tar"
  (cd "$folder.part" && sha256sum -- *.dump runs.bundle objects.tar >SHA256SUMS)
  sync
  mv -T "$folder.part" "$folder"
  log "done: $folder, $(du -sh "$folder" | cut -f1). Keep infra/.env with it: without its signing key every model is rejected."
}

restore() {
  [ -f "$folder/SHA256SUMS" ] || fail "$folder contains no backup. Name a folder that \`make backup\` created: make restore FROM=folder"
  (cd "$folder" && sha256sum --check --quiet SHA256SUMS) || fail "$folder is damaged. Nothing was changed."
  log "objects"
  in_worker python -m infra.objects load <"$folder/objects.tar"
  log "commits of the runs"
  in_worker bash -euc 'cat > /tmp/runs.bundle; git -C /shared/dpo fetch --quiet /tmp/runs.bundle "+refs/heads/runs/*:refs/heads/runs/*"; rm /tmp/runs.bundle' <"$folder/runs.bundle"
  for name in "${databases[@]}"; do # into a new database first: if that fails, the old one stays in place
    log "database $name"
    sql "DROP DATABASE IF EXISTS ${name}_restored WITH (FORCE)"
    sql "CREATE DATABASE ${name}_restored ENCODING 'UTF8' TEMPLATE template0"
    "${compose[@]}" exec -T postgres pg_restore --username dpo --dbname "${name}_restored" --exit-on-error <"$folder/$name.dump"
  done
  log "restarting servers"
  "${compose[@]}" stop worker prefect mlflow
  for name in "${databases[@]}"; do
    sql "DROP DATABASE IF EXISTS $name WITH (FORCE)"
    sql "ALTER DATABASE ${name}_restored RENAME TO $name"
  done
  "${compose[@]}" start mlflow prefect worker
  log "done: $folder is restored"
}

[ -n "$folder" ] || fail "name a folder: make backup TO=folder, make restore FROM=folder"
case $verb in
backup | restore) "$verb" ;;
*) fail "usage: infra/backup.sh backup|restore FOLDER" ;;
esac
