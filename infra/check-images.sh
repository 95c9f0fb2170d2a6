#!/usr/bin/env bash
# Check that every image is pinned by digest: a tag can be moved to another image, a digest cannot.
#   docker compose -f infra/compose.yaml config | infra/check-images.sh
#   kubectl kustomize infra/k8s | infra/check-images.sh
# Compose takes digests from infra/.env (BASE_DIGEST, DPO_DIGEST, POSTGRES_DIGEST, S3_DIGEST), Kubernetes from `images:`
# in infra/k8s/kustomization.yaml. `docker buildx imagetools inspect IMAGE` prints a digest.
set -euo pipefail
images=$(grep -oP '^\s*(- )?image:\s*\K\S+' | tr -d "\"'" | sort -u) || true
if [ -z "$images" ]; then
  echo "error: found no image in the input. Pipe in the output of \`docker compose config\` or \`kubectl kustomize\`." >&2
  exit 2
fi
if loose=$(grep -vP '@sha256:[0-9a-f]{64}$' <<<"$images"); then
  echo "error: these images have no digest, so a registry could replace them:" >&2
  sed 's/^/  /' <<<"$loose" >&2
  exit 1
fi
echo "every image is pinned by digest:"
sed 's/^/  /' <<<"$images"
