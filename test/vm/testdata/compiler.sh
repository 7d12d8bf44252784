#!/bin/sh
# Stands for gcc and go in the machine: copies what they would make from where it was made before.
while [ $# -gt 0 ]; do
	case $1 in
	-o) out=$2; shift ;;
	*.c) made=${1%.c}.compiled ;;
	*/cmd/harena-guest) made=/harena/bin/harena-guest ;;
	esac
	shift
done
exec cp -- "$made" "$out"
