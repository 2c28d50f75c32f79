#!/usr/bin/env bash
# Start two nodes and train on both with ZeRO-3.  Arguments go to the trainer: ./run.sh --steps 100
set -euo pipefail
cd "$(dirname "$0")"

if docker compose version >/dev/null 2>&1; then
  compose=(docker compose)
elif command -v docker-compose >/dev/null; then
  compose=(docker-compose) # Debian's package
else
  echo "run.sh: neither 'docker compose' nor docker-compose is there: apt-get install docker-compose" >&2
  exit 2
fi

# One key for all nodes, without a passphrase: they log in to each other with it.
[[ -e cluster_key ]] || ssh-keygen -q -t ed25519 -N '' -C cluster -f cluster_key

"${compose[@]}" up -d

on_node1() { "${compose[@]}" exec -T --user trainyard node1 "$@"; }

for _ in {1..30}; do # until sshd answers
  if on_node1 ssh -o ConnectTimeout=2 node2 true 2>/dev/null; then break; fi
  sleep 1
done

on_node1 launch --hostfile /job/hostfile /opt/trainyard/examples/train_zero3.py \
  --result-dir /home/trainyard/results "$@"
