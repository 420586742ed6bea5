#!/usr/bin/env bash
# Builds the site of this checkout in build/site, and that of each release, a tag such as v0.1.0, in build/site/v0.1.0.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
DOCS_RELEASES=$(git tag --list 'v*' --sort=-version:refname | tr '\n' ' ')
export DOCS_RELEASES
"$python" -m sphinx -q -W -c docs . build/site
for tag in $DOCS_RELEASES; do
  git worktree add --force --detach "build/$tag" "$tag"
  (cd "build/$tag" && DOCS_ROOT=../ "$python" -m sphinx -q -c docs . "../site/$tag") # with the package of that release
  git worktree remove --force "build/$tag"
done
