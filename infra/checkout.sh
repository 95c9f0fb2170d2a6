#!/usr/bin/env bash
# infra/checkout.sh IMAGE CHECKOUT: create the shared checkout from the image's code, or merge the code of a newer image
# into it. The branch `image` has one commit per image; it is merged with your commits and uncommitted edits.
# Runs, branches and untracked files stay. A checkout cloned from DPO_REPOSITORY is not touched: update it with git.
set -euo pipefail
image=$(realpath "$1")
checkout=$2
first="As the image has it"

git() { command git -c user.name=dpo -c user.email=dpo@localhost "$@"; }
refuse() {
  echo "error: $*" >&2
  exit 1
}

mkdir -p "$(dirname "$checkout")"
exec 9> "$checkout.lock" # one worker at a time
flock 9

if [ ! -d "$checkout/.git" ]; then
  rm -rf "$checkout.new" # left by a killed worker
  if [ -n "${DPO_REPOSITORY:-}" ]; then
    git clone --quiet "$DPO_REPOSITORY" "$checkout.new"
  else # a new repository: every run becomes a commit
    cp --recursive "$image" "$checkout.new"
    git -C "$checkout.new" init --quiet --initial-branch main
    git -C "$checkout.new" add --all
    git -C "$checkout.new" commit --quiet --message "$first"
    git -C "$checkout.new" branch image
  fi
  mv --no-target-directory "$checkout.new" "$checkout"
  exit
fi

cd "$checkout"
if [ -f .git/upgrade ]; then # a worker was killed while it wrote the files of this commit
  rm -f .git/index.lock
  git reset --quiet --hard "$(cat .git/upgrade)"
  rm .git/upgrade
fi
if ! git rev-parse --quiet --verify refs/heads/image > /dev/null; then # cloned, or created by a version without upgrades
  made=$(git log --max-parents=0 --format='%H %s' | sed -n "s/ $first\$//p")
  [ -n "$made" ] || exit 0
  git branch image "$made"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
in_image() { (cd "$image" && GIT_INDEX_FILE="$scratch/index" git --git-dir="$checkout/.git" --work-tree="$image" "$@"); }
in_image add --all
tree=$(in_image write-tree)
if [ "$tree" != "$(git rev-parse 'image^{tree}')" ]; then
  git update-ref refs/heads/image "$(git commit-tree "$tree" -p image -m "The code of a new image")"
fi
if git merge-base --is-ancestor image HEAD; then exit 0; fi

[ ! -f .git/MERGE_HEAD ] || refuse "$checkout has an unfinished merge. Finish it with \`git commit\`, then start the worker again."
for lock in .scratch/run.lock .scratch/worktrees/*/.scratch/run.lock; do
  if [ -e "$lock" ] && ! flock --shared --nonblock "$lock" true; then
    echo "Waiting for the run in $checkout/${lock%/.scratch/run.lock}: its code must not change while it runs"
    flock --shared "$lock" true
  fi
done
git add --update
git diff --cached --quiet || git commit --quiet --message "Edits before an upgrade"
if ! git merge-tree --write-tree --name-only HEAD image > "$scratch/merged"; then
  files=$(sed '1d;/^$/,$d' "$scratch/merged" | tr '\n' ' ')
  refuse "the new image and your edits in $checkout change the same lines of: ${files% }. Nothing was upgraded." \
    "Merge them (\`cd $checkout && git merge image\`, edit the files, \`git add\`, \`git commit\`) and start the worker again," \
    "or start the previous image."
fi
tree=$(head -n 1 "$scratch/merged")
git diff --name-only --diff-filter=A HEAD "$tree" | while read -r file; do
  if [ -e "$file" ]; then
    mv "$file" "$file.before-upgrade"
    echo "The new image has a file $file. Your untracked file of that name is now $file.before-upgrade"
  fi
done
kept=$(git diff --name-only image HEAD | grep -Fxf <(git diff --name-only image "$tree") | tr '\n' ' ' || true)
git commit-tree "$tree" -p HEAD -p image -m "Upgrade to a new image" > .git/upgrade.new
mv .git/upgrade.new .git/upgrade # from here on, the next start completes the upgrade
git reset --quiet --hard "$(cat .git/upgrade)"
rm .git/upgrade
echo "$checkout now has the code of the new image. Your edits are kept: ${kept:-none}"
