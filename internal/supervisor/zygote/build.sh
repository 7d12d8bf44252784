#!/bin/sh
# Builds zygote.bin, which the Go package embeds. Needs gcc and the kernel's headers (linux-libc-dev).
set -eu
cd "$(dirname "$0")"
${CC:-gcc} -std=gnu11 -Os -Wall -Wextra -Werror \
	-ffreestanding -fno-builtin -fno-stack-protector -fno-pic -fno-asynchronous-unwind-tables -fcf-protection=none \
	-fno-tree-loop-distribute-patterns -mgeneral-regs-only \
	-nostdlib -static -no-pie -s \
	-Wl,-z,noexecstack,-z,noseparate-code,-z,norelro,--build-id=none \
	-o zygote.bin.new src/zygote.c
mv zygote.bin.new zygote.bin
