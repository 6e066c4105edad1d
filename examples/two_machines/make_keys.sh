#!/bin/sh
# Make one key for root and one for sshd, while the image is built. Both machines come from this image, so each can log
# in to the other and knows its host key. Whoever has the image has these keys: don't push it to a registry.
set -eu
mkdir -p /run/sshd "$HOME/.ssh"
chmod 700 "$HOME/.ssh"
rm -f /etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
ssh-keygen -q -t ed25519 -N '' -f "$HOME/.ssh/id_ed25519"
cp "$HOME/.ssh/id_ed25519.pub" "$HOME/.ssh/authorized_keys"
echo "node1,node2 $(cut -d ' ' -f 1,2 /etc/ssh/ssh_host_ed25519_key.pub)" > "$HOME/.ssh/known_hosts"
