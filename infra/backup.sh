#!/usr/bin/env bash
# Backup and restore of the stack of infra/compose.yaml: Prefect's and MLflow's databases, the object store, the commits of
# all runs. `make backup TO=folder` and `make restore FROM=folder` call it; COMPOSE names another compose command.
#   infra/backup.sh backup FOLDER     while the stack runs; FOLDER must not exist
#   infra/backup.sh restore FOLDER    replaces the databases, adds objects and branches; the servers restart meanwhile
set -euo pipefail
umask 077 # MLflow's users and Prefect's blocks are in the databases
verb=${1:-} folder=${2:-}
read -ra compose <<<"${COMPOSE:-docker compose -f infra/compose.yaml}"
databases=(prefect mlflow)
fail() { echo "error: $*" >&2; exit 2; }
say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
in_worker() { "${compose[@]}" exec -T worker "$@"; }
sql() {
  "${compose[@]}" exec -T postgres psql --username dpo --dbname postgres --quiet --set ON_ERROR_STOP=1 \
    --command "SET client_min_messages = warning" --command "$1"
}

backup() {
  [ ! -e "$folder" ] || fail "$folder exists already. Name a new folder: make backup TO=folder"
  mkdir -p "$folder.part"
  # Databases first: objects are only added, so that every object which a database names is in the copy made after it.
  for name in "${databases[@]}"; do
    say "database $name"
    "${compose[@]}" exec -T postgres pg_dump --username dpo --format custom "$name" >"$folder.part/$name.dump"
  done
  say "commits of the runs"
  in_worker git -C /shared/dpo bundle create --quiet - --all >"$folder.part/runs.bundle"
  say "objects"
  in_worker python -m infra.objects dump >"$folder.part/objects.tar"
  (cd "$folder.part" && sha256sum -- *.dump runs.bundle objects.tar >SHA256SUMS)
  sync
  mv -T "$folder.part" "$folder"
  say "done: $folder, $(du -sh "$folder" | cut -f1). Keep infra/.env with it: without its signing key no model is accepted."
}

restore() {
  [ -f "$folder/SHA256SUMS" ] || fail "$folder holds no backup. Name a folder that \`make backup\` made: make restore FROM=folder"
  (cd "$folder" && sha256sum --check --quiet SHA256SUMS) || fail "$folder is damaged. Nothing was changed."
  say "objects"
  in_worker python -m infra.objects load <"$folder/objects.tar"
  say "commits of the runs"
  in_worker bash -euc 'cat > /tmp/runs.bundle; git -C /shared/dpo fetch --quiet /tmp/runs.bundle "+refs/heads/runs/*:refs/heads/runs/*"; rm /tmp/runs.bundle' <"$folder/runs.bundle"
  for name in "${databases[@]}"; do # aside first: one that cannot be restored leaves the old one in place
    say "database $name"
    sql "DROP DATABASE IF EXISTS ${name}_restored WITH (FORCE)"
    sql "CREATE DATABASE ${name}_restored"
    "${compose[@]}" exec -T postgres pg_restore --username dpo --dbname "${name}_restored" --exit-on-error <"$folder/$name.dump"
  done
  say "servers restart"
  "${compose[@]}" stop worker prefect mlflow
  for name in "${databases[@]}"; do
    sql "DROP DATABASE IF EXISTS $name WITH (FORCE)"
    sql "ALTER DATABASE ${name}_restored RENAME TO $name"
  done
  "${compose[@]}" start mlflow prefect worker
  say "done: $folder is restored"
}

[ -n "$folder" ] || fail "name a folder: make backup TO=folder, make restore FROM=folder"
case $verb in
backup | restore) "$verb" ;;
*) fail "usage: infra/backup.sh backup|restore FOLDER" ;;
esac
