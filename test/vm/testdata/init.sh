#!/bin/bash
# The machine's init: what a distribution's would have done that matters here, then the steps.
exec </dev/null >/dev/console 2>&1
export PATH=/harena/compilers:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mkdir -p /dev/pts /dev/shm /run/lock
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mount -t securityfs securityfs /sys/kernel/security
mount -t cgroup2 -o nsdelegate,memory_recursiveprot cgroup2 /sys/fs/cgroup
mount --make-rshared /
ln -sf /proc/self/fd /dev/fd
for i in 0:stdin 1:stdout 2:stderr; do ln -sf "/proc/self/fd/${i%:*}" "/dev/${i#*:}"; done
ip link set lo up
hostname second-kernel
modprobe loop # loop-control is made at start by the names that udev knows
# Swap, in compressed memory: what pausing gives memory back to.
modprobe zram
echo 1G >/sys/block/zram0/disksize
mkswap -q /dev/zram0 && swapon /dev/zram0
printf '127.0.0.1 localhost second-kernel\n' >/etc/hosts
# What goes to the port comes out of QEMU.
exec >"$(echo /dev/vport*p1)" 2>&1
cd /harena

# step NAME DIR LIMIT SCRIPT
step() {
	local begin=$SECONDS status=0
	echo "$mark begin $1"
	(cd "$2" && LIMIT=$3s exec timeout --kill-after=10 $(($3 + 10)) bash "/harena/$4") || status=$?
	printf '\n%s\n' "$mark end $1 $status $((SECONDS - begin))"
}
. steps/list
echo "$mark done"
echo o >/proc/sysrq-trigger
sleep 100
