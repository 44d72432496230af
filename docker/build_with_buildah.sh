#!/usr/bin/env bash
# Build the image without Docker and try it: root's, a user's that it does not know, compiled. Tells the layers' sizes.
#
#   docker/build_with_buildah.sh FOLDER
#
# FOLDER keeps the base and the image; a second call builds what has changed. Needs root, buildah and debootstrap
# (Debian's packages). The base is Debian with its python3, from the mirror that apt uses. pip is configured in the build
# as it is here: its settings and the folders that they name are mounted read-only, and are not in the image.
set -euo pipefail
if [ "$#" -ne 1 ]; then
  echo "usage: $0 FOLDER" >&2
  exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
source_tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
image=localhost/lightning-pp
# shellcheck source=/dev/null
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
# shellcheck disable=SC2016  # the dollar is apt's
mirror=$(apt-get indextargets --format '$(SITE)' "Codename: $release" | head -n 1)

bah() {
  buildah --root "$folder/storage" --runroot "$folder/run" "$@"
}

if ! bah images localhost/base > /dev/null 2>&1; then
  rm -rf "$folder/rootfs"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-dev,python3-venv \
    "$release" "$folder/rootfs" "$mirror"
  rm -rf "$folder"/rootfs/var/cache/apt/* "$folder"/rootfs/var/lib/apt/lists/*
  base=$(bah from scratch)
  bah copy --quiet "$base" "$folder/rootfs" /
  bah commit --quiet --rm "$base" localhost/base
  rm -rf "$folder/rootfs"
fi

python3 -m pip config list | python3 "$source_tree/docker/pip_settings.py" "$folder/pip.conf" > "$folder/places"
volumes=(--volume "$folder/pip.conf:/etc/pip.conf:ro")
while read -r place; do
  volumes+=(--volume "$place:$place:ro")
done < "$folder/places"

bah build --isolation chroot --layers --format docker "${volumes[@]}" \
  --build-arg PYTHON_IMAGE=localhost/base --build-arg DEVICE=gpu --tag "$image" "$source_tree"

rm -rf "$folder/pushed"
bah push --quiet --disable-compression "$image" "dir:$folder/pushed"
echo "layers, from the base up, bytes, not compressed:"
python3 -c 'import json, sys; [print(format(one["size"], "14,")) for one in json.load(open(sys.argv[1]))["layers"]]' \
  "$folder/pushed/manifest.json"
rm -rf "$folder/pushed"

container=$(bah from "$image")
trap 'bah rm "$container" > /dev/null' EXIT
for user in 0:0 1000:1000 12345:12345; do
  echo "smoke as $user"
  bah run --isolation chroot --user "$user" "$container" -- entrypoint smoke
done
echo "smoke with strategy.compile=true"
bah run --isolation chroot --user 12345:12345 "$container" -- entrypoint smoke strategy.compile=true
