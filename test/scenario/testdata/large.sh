# Makes a root file system of compilers, a JDK and a Python stack from Debian packages in the directory $1; whoever
# changes this line gets a new image. It runs in mount and PID namespaces of its own, so that nothing stays mounted.
set -eu
tree=$1
mount --make-rprivate /
mirror=$(sed -n 's/^URIs: *\(http[^ ]*\/debian\)\/* *$/\1/p; s/^deb *\(http[^ ]*\/debian\)\/* .*/\1/p' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -n 1)
mirror=${mirror:-http://deb.debian.org/debian}
export LC_ALL=C DEBIAN_FRONTEND=noninteractive DPKG_FORCE=unsafe-io
debootstrap --variant=minbase --keyring=/usr/share/keyrings/debian-archive-keyring.gpg --include=ca-certificates bookworm "$tree" "$mirror"
mount -t proc proc "$tree/proc"
printf '#!/bin/sh\nexit 101\n' >"$tree/usr/sbin/policy-rc.d" # no service is started
chmod 755 "$tree/usr/sbin/policy-rc.d"
touch "$tree/etc/resolv.conf" "$tree/etc/hosts"
mount --bind /etc/resolv.conf "$tree/etc/resolv.conf"
mount --bind /etc/hosts "$tree/etc/hosts"
chroot "$tree" apt-get -qq -y --no-install-recommends install gcc g++ gfortran clang llvm gdb valgrind make cmake git sudo iputils-ping \
	default-jdk-headless python3-numpy python3-scipy python3-pandas python3-matplotlib python3-sklearn python3-pytest cython3 \
	golang-go rustc cargo nodejs ghc
chroot "$tree" apt-get clean
rm -rf "$tree"/var/lib/apt/lists/* "$tree/usr/sbin/policy-rc.d"
umount "$tree/etc/resolv.conf" "$tree/etc/hosts" "$tree/proc"
