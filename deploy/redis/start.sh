#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Start a server from the configuration files beside this one, with the users of users.acl.
#
#   start.sh cache.conf [tls.conf] [cluster.conf] [-- more arguments for redis-server]
#
# READER_PASSWORD, WRITER_PASSWORD, GUEST_PASSWORD and ADMIN_PASSWORD are the users' passwords; only their hashes are written.
# RUN_DIR is where to write (default: a new directory), REDIS_SERVER the program (default: redis-server).
set -eu
umask 077
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
run=${RUN_DIR:-$(mktemp -d)}
server=${REDIS_SERVER:-redis-server}

hash() {
  printf '%s' "$1" | sha256sum | cut -d ' ' -f 1
}

: >"$run/redis.conf"
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  cat "$here/$1" >>"$run/redis.conf"
  shift
done
[ $# -eq 0 ] || shift

sed -e "s/@READER@/$(hash "${READER_PASSWORD:?is not set}")/" \
  -e "s/@WRITER@/$(hash "${WRITER_PASSWORD:?is not set}")/" \
  -e "s/@GUEST@/$(hash "${GUEST_PASSWORD:?is not set}")/" \
  -e "s/@ADMIN@/$(hash "${ADMIN_PASSWORD:?is not set}")/" "$here/users.acl" >"$run/users.acl"
case $("$server" --version) in
*v=6.*)
  # 6.2 cannot tell reading a key from writing it: a reader has no command that writes, and a guest does without tb:*.
  sed -e '/%RW~/s/%R~[^ ]* //' -e 's/%RW*~/~/g' -e '/evalsha /s/+eval_ro +evalsha_ro //' \
    -e 's/+eval_ro +evalsha_ro/+eval +evalsha/' "$run/users.acl" >"$run/users.acl.new"
  mv "$run/users.acl.new" "$run/users.acl"
  ;;
esac
# The server has no use for them.
unset READER_PASSWORD WRITER_PASSWORD GUEST_PASSWORD ADMIN_PASSWORD
exec "$server" "$run/redis.conf" --dir "$run" --aclfile "$run/users.acl" "$@"
