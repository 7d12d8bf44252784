#!/bin/busybox sh
# The machine's first process: loads modules, puts the root file system together, and gives it to the next one.
/bin/busybox --install -s /bin
mkdir -p /dev /proc /sys /disk /base /root
mount -t devtmpfs devtmpfs /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
fail() { echo "init: $*" >/dev/console; poweroff -f; }
for m in $(cat /modules/order); do insmod /modules/$m || fail "module $m"; done
# Disks are told apart by their serial numbers: their order is not promised.
disk() { for d in /sys/block/vd*; do [ "$(cat $d/serial)" != "$1" ] || echo /dev/${d##*/}; done; }
mount -t ext4 "$(disk disk)" /disk || fail "no disk"
mount -t erofs -o ro,device="$(disk blob)" "$(disk meta)" /base || fail "no base"
mount -t overlay -o lowerdir=/base,upperdir=/disk/upper,workdir=/disk/work overlay /root || fail "no root"
mkdir -p /root/harena
mount --bind /disk/tmp /root/tmp || fail "no tmp"
mount --bind /disk/var-tmp /root/var/tmp || fail "no var/tmp"
mount --bind /disk/harena /root/harena || fail "no checkout"
for d in dev proc sys; do mount --move /$d /root/$d; done
exec switch_root /root /init
