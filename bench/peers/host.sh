#!/bin/sh
# Runs a command on a host of `psbench peers --hosts`, in place of ssh: host.sh HOSTS ADDRESS COMMAND...
# HOSTS is NAMESPACE@ADDRESS of each, with commas between.
hosts=$1
address=$2
shift 2
for host in $(echo "$hosts" | tr , ' '); do
    if [ "${host#*@}" = "$address" ]; then
        exec nsenter --net="${host%@*}" -- sh -c "$*"
    fi
done
echo "found no host $address in $hosts" >&2
exit 1
